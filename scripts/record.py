"""Results of measurements as small JSON files."""

import datetime
import json
import platform

import jax


def record(command: str, result: dict, output: str | None) -> None:
    """Prints ``result`` as JSON with command, date and versions before it, and writes it to the file ``output`` where given."""
    devices = jax.devices()
    document = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": f"{len(devices)} x {devices[0].device_kind}",
        **result,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if output:
        with open(output, "w") as file:
            file.write(text + "\n")
