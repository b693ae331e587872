"""Answers and calibrated scores as documents of LangChain, LlamaIndex and Haystack.

One file a package, which imports it: `sfumato.adapters.langchain`, `.llama_index` and `.haystack`.
"""
