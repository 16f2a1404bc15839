"""Time the two ways in which captured passes can attend to long ranges of keys, on a GPU; JSON on the standard output.

python -m scripts.bench_attention [--device cuda:1] [--dtype float16]
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from triforce_tools.bench.attention import CASES, bench_attention

from triforce_core.models.device import DTYPES, torch_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16")
    asked = parser.parse_args()
    device = torch_device(asked.device)
    figures = bench_attention(device, DTYPES[asked.dtype], CASES, lambda line: print(line, file=sys.stderr))
    named = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "dtype": asked.dtype}
    print(json.dumps(named | figures, indent=2))


if __name__ == "__main__":
    main()
