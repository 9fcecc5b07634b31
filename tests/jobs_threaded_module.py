"""Begins a thread when it is imported, so that a fork after it is not safe."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
