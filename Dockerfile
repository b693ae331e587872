# A service on CPUs: the page and the HTTP interface of `sfumato serve` for a mounted index.
#
#   docker build --tag sfumato .
#   docker run --publish 127.0.0.1:8000:8000 --env SFUMATO_API_KEY=... --volume "$PWD/my-index:/index:ro" sfumato
#
# --build-arg EXTRAS= chooses the extras; serve has to be among them. With one that needs torch (train, offline,
# backbones) its build for CPUs is installed. TORCH_INDEX= is another package index for torch, such as a mirror;
# PIP_INDEX_URL= one for all else. The file system may be read-only, with a tmpfs at /tmp.
FROM python:3.11-slim

ARG EXTRAS=serve,faiss
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_INDEX_URL

ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    SFUMATO_CACHE=/tmp/sfumato HOME=/tmp

WORKDIR /build

# The CPU build of torch first, alone: its index has no other package, and the usual build is for GPUs, of gigabytes.
COPY constraints.txt ./
RUN case ",$EXTRAS," in *,train,*|*,offline,*|*,backbones,*|*,open-clip,*|*,demo,*|*,all,*) \
    pip install --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)" ;; esac

COPY pyproject.toml README.md LICENSE ./
COPY recipes recipes
COPY src src
RUN pip install --constraint constraints.txt ".[$EXTRAS]" && pip check

WORKDIR /tmp
USER 10001:10001
EXPOSE 8000

HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]

ENTRYPOINT ["sfumato"]
CMD ["serve", "/index", "--host", "0.0.0.0", "--port", "8000"]
