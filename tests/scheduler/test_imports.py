from __future__ import annotations

import subprocess
import sys


def test_the_scheduler_process_loads_no_tensor_library_and_no_other_room() -> None:
    code = (
        "import sys, freetoken.scheduler.process; "
        "rooms = ('api', 'worker', 'model', 'experts', 'kernels'); "
        "banned = {'torch', 'numpy', 'transformers', 'safetensors', 'tokenizers', 'triton', "
        "*(f'freetoken.{room}' for room in rooms)}; "
        "print(sorted(banned & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
