"""LocalStore and its engines; the rerank stores are in test_rerank_store.py, what all stores share in stores_contract.py."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from search.stores_contract import FINGERPRINT, StoreContract, assert_holds, assert_nearest, by_id, queries, records, squared_l2

from sfumato.errors import UserError
from sfumato.search.stores import local
from sfumato.search.stores.base import Filter, Records
from sfumato.search.stores.open import create_store, open_store

ENGINES = ("flat", "hnsw", "ivf", "ivf-pq")


class TestFlat(StoreContract):
    def create(self, tmp_path, dim):
        return create_store(f"file:{tmp_path}/store", dim, FINGERPRINT)


class TestFlatInManyShards(StoreContract):
    def create(self, tmp_path, dim):
        return create_store(f"{tmp_path}/new/store?engine=flat&shard_size=7", dim, FINGERPRINT)
