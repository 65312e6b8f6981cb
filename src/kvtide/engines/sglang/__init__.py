"""SGLang: a storage backend for its hierarchical cache.

--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
'{"backend_name": "kvtide", "module_path": "kvtide.engines.sglang.storage", "class_name": "KVTideStorage",
  "store": "disk:///var/cache/kvtide", "fingerprint": "model and revision"}'
"""
