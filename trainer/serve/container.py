"""Any engine's command in its published container: folders mounted, the port open, nothing of the host assumed.

Flags as in vLLM's, SGLang's and TensorRT-LLM's own container pages and NVIDIA's playbooks.
"""

from dataclasses import replace
from pathlib import Path

from trainer.serve.plan import NEEDS_MODEL, ServePlan, ServeRequest, ServingEngine, flag_value

TARGET, DRAFTER, CONFIG, HUB_CACHE = "/models/target", "/models/drafter", "/config", "/models/hub"
_DOCKER = (
    "docker",
    "run",
    "--rm",
    "--gpus",
    "all",
    "--ipc=host",
    "--ulimit",
    "memlock=-1",
    "--ulimit",
    "stack=67108864",
)


def containerised(engine: ServingEngine, request: ServeRequest) -> ServePlan:
    """The plan of ``request`` as ``docker run``; local folders and the configuration file become mounts.

    Raises:
        ConfigError: what the engine's own plan raises.
    """
    mounts: list[tuple[str, str]] = []
    inside = replace(request, form="command")
    if Path(request.target).is_dir():
        mounts.append((_absolute(request.target), TARGET))
        inside = replace(inside, target=TARGET)
    if request.method in NEEDS_MODEL and request.drafter and Path(request.drafter).is_dir():
        mounts.append((_absolute(request.drafter), DRAFTER))
        inside = replace(inside, drafter=DRAFTER)
    if flag_value(request.flags, "--host") is None:
        inside = replace(inside, flags=("--host", "0.0.0.0", *inside.flags))
    if flag_value(request.flags, "--port") is None:
        inside = replace(inside, flags=("--port", str(engine.port), *inside.flags))
    on_host = request.config_file or engine.config_file
    if on_host is not None:
        inside = replace(inside, config_file=f"{CONFIG}/{Path(on_host).name}")
    planned = engine.plan(inside)
    files = {}
    for there, text in planned.files.items():
        files[on_host or there] = text
        mounts.append((_absolute(on_host or there), there))
    command = [*_DOCKER, "-p", f"{planned.port}:{planned.port}"]
    command += ["-v", f"{Path.home() / '.cache' / 'huggingface'}:{HUB_CACHE}"]
    command += ["-e", f"HF_HOME={HUB_CACHE}", "-e", "HF_TOKEN"]
    for host, there in mounts:
        command += ["-v", f"{host}:{there}:ro"]
    for name, value in planned.env.items():
        command += ["-e", f"{name}={value}"]
    image = engine.image(request.version)
    start = list(planned.command)
    if engine.entrypoint:
        command += ["--entrypoint", engine.entrypoint, image, *start[1:]]
    else:
        command += [image, *start]
    return replace(planned, command=tuple(command), files=files, env={}, image=image)


def _absolute(path: str) -> str:
    return str(Path(path).absolute())
