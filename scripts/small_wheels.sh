#!/usr/bin/env bash
# scripts/small_wheels.sh FOLDER: the wheels that scripts/gpu_served.py needs on a machine with PyTorch, transformers and
# what these need, for CPython 3.12 on x86-64, of requirements.lock's versions, packed small so that they can be carried.
set -eu
lock=$(realpath "$(dirname "$0")/../requirements.lock") python=${PYTHON:-python3}
mkdir -p "$1" && cd "$1"
"$python" -m pip download -q -c "$lock" --no-deps --only-binary=:all: --python-version 3.12 \
    --platform manylinux2014_x86_64 --platform manylinux_2_31_x86_64 -d . ray grpcio protobuf msgpack psutil jsonschema \
    jsonschema-specifications referencing rpds-py attrs requests urllib3 charset-normalizer pydantic pydantic-core \
    annotated-types typing-inspection rich llguidance platformdirs
# Without what tier actors do not use of Ray, without symbols, and with LZMA, which pip reads too. RECORD's hashes no
# longer hold; pip does not compare them.
"$python" - ./*.whl << 'PACK'
import os, subprocess, sys, tempfile, zipfile
UNUSED = tuple(f"ray/{name}/" for name in "jars dashboard/client rllib tune train data serve llm air".split())
for wheel in sys.argv[1:]:
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile("part", "w") as new:
        for info in (info for info in old.infolist() if not info.filename.startswith(UNUSED)):
            data = old.read(info)
            if data.startswith(b"\x7fELF"):
                with tempfile.NamedTemporaryFile() as file:  # strip replaces the file
                    file.write(data), file.flush()
                    subprocess.run(["strip", "--strip-unneeded", file.name], check=True)
                    data = open(file.name, "rb").read()
            new.writestr(info, data, zipfile.ZIP_LZMA)
    os.replace("part", wheel)
PACK
ls -l ./*.whl
