from chassis import service
from kvstore.config import Config
from kvstore.service import KvStore

if __name__ == "__main__":
    service.main("kvstore", Config, KvStore)
