"""What machine this is, and how to ask for several devices on a host that has only a CPU.

Importing it does not start JAX: `request_devices` must run before that, `describe_devices` does it.
"""

import dataclasses
import os
import re
import sys
import warnings

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_COUNT_PATTERN = re.compile(rf"{_COUNT_FLAG}[= ](\d+)")


@dataclasses.dataclass(frozen=True)
class DeviceDescription:
    """The devices that JAX found.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      kind: The vendor's name of the device.
      count: Devices of all processes.
      local_count: Devices of this process: what `pmap` maps over.
      cores: CPU cores that this process may use.
      memory: Bytes of one accelerator, or of the host that CPU devices share; None if not told.
    """

    platform: str
    kind: str
    count: int
    local_count: int
    cores: int
    memory: int | None

    @property
    def oversubscribed(self) -> bool:
        """Whether forced host devices take turns on too few cores."""
        return self.platform == "cpu" and self.local_count > self.cores

    def __str__(self) -> str:
        """One line, and a second one where the devices cannot speed anything up."""
        plural = "" if self.count == 1 else "s"
        local = "" if self.count == self.local_count else f" ({self.local_count} in this process)"
        memory = "unknown memory" if self.memory is None else f"{self.memory / 2**30:.1f} GiB"
        owner = "of host memory, shared" if self.platform == "cpu" else "a device"
        line = (
            f"{self.count} {self.platform} device{plural}{local}: {self.kind}; "
            f"{self.cores} CPU core{'' if self.cores == 1 else 's'}; {memory} {owner}"
        )
        if self.oversubscribed:
            line += (
                f"\n{self.local_count} host devices share {self.cores} cores: "
                "they teach how programs are spread, they do not speed them up"
            )
        return line


def request_devices(num_devices: int) -> None:
    """Asks for several devices on a host that has only a CPU. JAX must not have started.

    Accelerators are left alone: where JAX finds some, the request has no effect. A count that the
    user has set, in `XLA_FLAGS` or as `jax_num_cpu_devices`, stays; a warning says so if it
    differs.

    Args:
      num_devices: How many CPU devices to make, at least 1.

    Raises:
      ValueError: `num_devices` is not a positive integer.
      RuntimeError: JAX has started with fewer CPU devices.
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise ValueError(f"num_devices must be a positive integer, given {num_devices!r}")
    if _jax_has_started():
        _check_started_devices(num_devices)
        return
    found = _COUNT_PATTERN.findall(os.environ.get("XLA_FLAGS", ""))
    if found:
        # Of a flag given twice, XLA takes the last.
        _keep_user_count(int(found[-1]), num_devices, f"XLA_FLAGS={_COUNT_FLAG}")
        return
    import jax

    # From jax 0.4.34 or so on there is an option, which also works where something else has made
    # XLA read its flags before; until then there is only the flag.
    configured = getattr(jax.config, "jax_num_cpu_devices", None)
    if configured is None:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT_FLAG}={num_devices}"
        os.environ["XLA_FLAGS"] = flags.strip()
    elif configured > 0:
        _keep_user_count(configured, num_devices, "jax_num_cpu_devices")
    else:
        jax.config.update("jax_num_cpu_devices", num_devices)


def describe_devices() -> DeviceDescription:
    """Describes the devices that JAX uses by default. Starts JAX."""
    import jax

    device = jax.local_devices()[0]
    return DeviceDescription(
        platform=device.platform,
        kind=device.device_kind,
        count=jax.device_count(),
        local_count=jax.local_device_count(),
        cores=_num_cores(),
        memory=_memory(device),
    )


def _jax_has_started() -> bool:
    # JAX has no public question for it that does not itself start JAX. The name is the same in
    # jax 0.4.30 and 0.12; where it goes, the error says so here and nowhere else.
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()


def _check_started_devices(num_devices: int) -> None:
    import jax

    found = jax.local_device_count()
    if jax.default_backend() == "cpu" and found < num_devices:
        raise RuntimeError(
            f"JAX has already started with {found} CPU device{'' if found == 1 else 's'}, "
            f"{num_devices} were asked for; restart the kernel (or the process) and call "
            "request_devices before the first use of JAX"
        )


def _keep_user_count(found: int, num_devices: int, where: str) -> None:
    if found != num_devices:
        warnings.warn(
            f"keeping {where}={found}, which was set before; "
            f"the request for {num_devices} devices has no effect",
            stacklevel=3,
        )


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory(device) -> int | None:
    if device.platform == "cpu":
        import psutil

        return psutil.virtual_memory().total
    return (device.memory_stats() or {}).get("bytes_limit")
