#!/usr/bin/env bash
# Makes .venv in this checkout and installs rlfuse with what it runs on; a finished install is recognised in well under
# a second. Called by jobs/quickstart.sh and tests/run.sh, and by hand.
#
#   bash jobs/install.sh            PYTHON=/path/to/python3.12 bash jobs/install.sh
#
# Without a GPU torch has to be the CPU build, which the ordinary package index does not carry. It comes from the folder
# that PIP_FIND_LINKS names, if that holds such a wheel, else from PyTorch's own CPU index.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # a run starts a dozen processes: cached bytecode halves that
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=2.13.0 # what vLLM 0.32.0 is built against
STAMP=.venv/installed.stamp
INDEX_WAIT_S=120 # until PyTorch's index counts as out of reach
INSTALL_WAIT_S=1800

say() { printf '[install +%ss] %s\n' "$SECONDS" "$*"; }
fail() {
    printf '[install] stopped: %s\n' "$*" >&2
    exit 1
}

wanted() { # everything that makes an earlier install out of date, the folder's own path among it
    { pwd && echo "$extra" && cat pyproject.toml jobs/install.sh jobs/torchvision_cpu.py; } | sha256sum
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "found $("${PYTHON:-python3}" --version 2>&1 | head -n 1 || true), but Python 3.11 or 3.12 is needed;" \
        "install one, or name it: PYTHON=/path/to/python3.12 bash jobs/install.sh"
}

make_venv() {
    [ -x .venv/bin/python ] && return
    local python
    python=$(find_python)
    say "making .venv with $("$python" --version)"
    "$python" -m venv .venv || fail "'$python -m venv .venv' failed; on Debian and Ubuntu install python3-venv"
}

cpu_wheel_folder() { # the folder of PIP_FIND_LINKS that holds torch's CPU build for this Python, if any
    local tag folder
    tag=$(.venv/bin/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
    for folder in ${PIP_FIND_LINKS:-}; do
        if compgen -G "$folder/torch-$TORCH+cpu-$tag-*.whl" >/dev/null; then
            echo "$folder"
            return
        fi
    done
}

uv_install() { # torchaudio and torchcodec are left out by [tool.uv] in pyproject.toml
    timeout "$INSTALL_WAIT_S" .venv/bin/uv pip install --python .venv/bin/python "$@" -e ".[$extra,dev]" ||
        fail "uv could not install the packages (its message is above); run the same command again to go on"
}

install_packages() {
    local folder
    if [ "$extra" = gpu ]; then
        say "installing for GPUs: vLLM, torch, DeepSpeed, Ray (some minutes on a first run)"
        uv_install
        return
    fi
    folder=$(cpu_wheel_folder)
    if [ -n "$folder" ]; then
        say "installing for CPUs, torch $TORCH+cpu from $folder (a minute or two on a first run)"
        UV_FIND_LINKS=$folder uv_install "torch==$TORCH+cpu"
        return
    fi
    say "asking PyTorch's CPU index for torch $TORCH+cpu (at most $INDEX_WAIT_S s)"
    timeout "$INDEX_WAIT_S" .venv/bin/uv pip install --python .venv/bin/python --torch-backend cpu --dry-run --no-deps \
        --quiet "torch==$TORCH" ||
        fail "PyTorch's CPU index gave no answer. Check the network or proxy, or download the wheel" \
            "torch-$TORCH+cpu for this Python elsewhere, put it into a folder and run again with PIP_FIND_LINKS=that-folder"
    say "installing for CPUs, torch from PyTorch's CPU index (a minute or two on a first run)"
    uv_install --torch-backend cpu
}

set_up_interpreter() { # what each Python of .venv, Ray's workers included, needs to know
    local site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # DeepSpeed's compiled extension is found again, also when nobody activated .venv; loading it calls ninja from PATH.
    # A fifth of what importing vLLM takes goes to looking for garbage among modules, at Python's default of 700.
    cat >"$site/rlfuse_environment.pth" <<'PTH'
import os, sys; os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
import os, sys; b = os.path.join(sys.prefix, "bin"); p = os.environ.get("PATH", ""); os.environ["PATH"] = p if b in p.split(os.pathsep) else b + os.pathsep + p
import gc; gc.set_threshold(10_000)
PTH
    if .venv/bin/python -c 'import torchvision' 2>/dev/null; then return; fi
    say "torchvision does not load beside this torch: adding the definitions it misses"
    cp jobs/torchvision_cpu.py "$site/rlfuse_torchvision_cpu.py"
    echo 'import rlfuse_torchvision_cpu' >"$site/rlfuse_torchvision_cpu.pth"
    .venv/bin/python -c 'import torchvision' || fail "torchvision still does not load; delete .venv and run again"
}

warm_deepspeed() {
    [ "$extra" = gpu ] && return # only the CPU's communication needs compiling
    say "compiling DeepSpeed's communication extension and Python's bytecode once (about a minute and a half)"
    { # uv leaves no bytecode behind; what every process imports is cached from here on, and so is compiled search
        .venv/bin/python -c 'from rlfuse.fusion.schedules.search import warm_up; warm_up()'
        local modules
        for modules in "accelerate, datasets, matplotlib.figure, vllm.v1.engine.async_llm, wandb" \
            "vllm.v1.engine.core, vllm.v1.worker.cpu_worker" "rlfuse.run, rlfuse.engines.training" \
            "ray.dashboard.dashboard, ray.dashboard.agent, ray._private.log_monitor, ray.autoscaler._private.monitor"; do
            .venv/bin/python -c "import $modules" || true # only for speed
        done
    } >/dev/null 2>&1 &
    if ! RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 timeout 600 .venv/bin/python \
        >.venv/deepspeed_build.log 2>&1 <<'PYTHON'; then
import deepspeed
import torch

deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
torch.distributed.destroy_process_group()
PYTHON
        say "that failed (.venv/deepspeed_build.log says why; a C++ compiler is needed)." \
            "Jobs still start, and try again by themselves"
    fi
    wait
}

extra=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then extra=gpu; fi
if [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted)" ]; then
    say "up to date (.venv)"
    exit 0
fi
make_venv
if [ ! -x .venv/bin/uv ]; then
    say "installing uv"
    .venv/bin/python -m pip install --quiet 'uv>=0.9,<1' ||
        fail "pip could not install uv (its message is above); if .venv is a half-made one, delete it and run again"
fi
install_packages
set_up_interpreter
warm_deepspeed
wanted >"$STAMP"
say "done. Use it with: source .venv/bin/activate"
