"""A child that ignores SIGTERM, and its parent's end for a while."""

import signal
import time

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready never", flush=True)
    time.sleep(30)
