#!/usr/bin/env python3
"""Batch jobs over several processes of this machine: the answers are those of one, and a process that dies costs none.

python scripts/several_processes.py [--processes 4] [--lines 120] [--model FOLDER] [--output FILE.json]

Each process has one CPU device, and JAX joins them over loopback. The same lines are answered by one process and over meshes
that have rows, the model, or both across processes. Then a process is killed with SIGKILL in the middle of a job, once the last
and once process 0, and the last is stopped with SIGSTOP, as if its host had gone without a word: how long the others take to end,
what they say, and whether the same command completes the job.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 1800
"""No job takes longer, however slow the machine is."""
FIRST_ANSWERS = 20
"""Answers of a job before a process is taken out of it."""


class Job:
    """One batch command on all processes."""

    def __init__(self, folder: Path, output: str, options: list[str], processes: int):
        self.output = folder / output
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{listening.getsockname()[1]}"
        # The second start of a job needs no compiler.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        environment = {**os.environ, **cache, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        self.running, self.said = [], [folder / f"said-{index}" for index in range(processes)]
        for index, said in enumerate(self.said):
            call = ["batch", str(folder / "in.jsonl"), str(self.output), *options]
            if processes > 1:
                call += ["--coordinator-address", address, "--num-processes", str(processes), "--process-id", str(index)]
            program = [sys.executable, "-c", f"from specjax.cli import main; main({call!r})"]
            with said.open("w") as file:
                self.running.append(subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL, stderr=file))

    def wait(self) -> list[int]:
        """The exit statuses, once all have ended."""
        try:
            return [process.wait(SECONDS) for process in self.running]
        finally:
            self.end()

    def end(self) -> None:
        """Ends what still runs."""
        for process in self.running:
            process.kill()
            process.wait()

    def records(self) -> list[dict]:
        """What is in the output so far."""
        if not self.output.exists():
            return []
        return [json.loads(data) for data in self.output.read_bytes().split(b"\n")[:-1]]

    def words(self, index: int) -> str:
        """The line with which a process ended, JAX's own where it was JAX that ended it."""
        lines = self.said[index].read_text().splitlines()
        ours = [line for line in lines if line.startswith("specjax: ")]
        return (ours or [line for line in lines if "Terminating process" in line] or lines or [""])[-1][:400]


def interrupted(folder: Path, output: str, options: list[str], processes: int, victim: int, by: signal.Signals) -> dict:
    """Takes one process out of a job after its first answers, and starts the job again when the others have ended."""
    job = Job(folder, output, options, processes)
    while len(job.records()) < FIRST_ANSWERS and all(process.poll() is None for process in job.running):
        time.sleep(0.02)
    job.running[victim].send_signal(by)
    start = time.monotonic()
    others = [index for index in range(processes) if index != victim]
    try:
        statuses = {index: job.running[index].wait(SECONDS) for index in others}
    finally:
        job.end()
    seconds = time.monotonic() - start
    answered, said = len(job.records()), {index: job.words(index) for index in others}
    again = Job(folder, output, options, processes)
    ended = again.wait()
    if any(ended):
        raise SystemExit("\n".join(said.read_text() for said in again.said))
    lines = sorted(record["line"] for record in again.records())
    return {
        "process": victim,
        "signal": by.name,
        "seconds_until_the_others_ended": round(seconds, 1),
        "statuses": statuses,
        "said": said,
        "answered_before": answered,
        "each_line_once_after_resuming": lines == list(range(1, len(lines) + 1)),
        "records": again.records(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--lines", type=int, default=120)
    parser.add_argument("--model", type=Path, default=ROOT / "tests" / "golden" / "tiny-llama", help="a small one; float32")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    count = arguments.processes
    if count < 2 or count % 2:
        parser.error(f"--processes is {count}; it must be an even number of at least 2")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "in.jsonl").open("w") as file:
            for n in range(arguments.lines):
                line = {"prompt": [3 + n % 50] * (1 + n % 7), "max_tokens": 3 + n % 9, "temperature": 0.8 * (n % 2), "seed": n}
                file.write(json.dumps(line) + "\n")
        options = ["--model", str(arguments.model), "--dtype", "float32", "--drafter", "lookup", "--rule", "gumbel"]
        options += ["--slots", str(count), "--capacity", "64"]

        def answers(records):
            return {record["line"]: record["token_ids"] for record in records}

        one = Job(folder, "one.jsonl", options, 1)
        if one.wait() != [0]:
            raise SystemExit(one.said[0].read_text())
        expected, results = answers(one.records()), []
        for mesh in (f"data={count}", f"data={count // 2},model=2", f"model={count}"):
            start, job = time.monotonic(), Job(folder, f"{mesh}.jsonl", [*options, "--mesh", mesh], count)
            statuses, found = job.wait(), answers(job.records())
            equal = sum(found.get(line) == tokens for line, tokens in expected.items())
            results.append({"mesh": mesh, "statuses": statuses, "equal": equal, "seconds": round(time.monotonic() - start, 1)})
            print(f"{mesh} over {count} processes: {equal} of {len(expected)} answers equal those of one process", flush=True)
        deaths = []
        for victim, by in ((count - 1, signal.SIGKILL), (0, signal.SIGKILL), (count - 1, signal.SIGSTOP)):
            output = f"{by.name}-{victim}.jsonl"
            death = interrupted(folder, output, [*options, "--mesh", f"data={count}"], count, victim, by)
            death["equal"] = sum(expected[line] == tokens for line, tokens in answers(death.pop("records")).items())
            deaths.append(death)
            print(
                f"process {victim}, {by.name} after {death['answered_before']} answers: the others ended within "
                f"{death['seconds_until_the_others_ended']} s; resumed, {death['equal']} of {len(expected)} equal",
                flush=True,
            )
    record(" ".join(["scripts/several_processes.py", *sys.argv[1:]]), {"meshes": results, "deaths": deaths}, arguments.output)
    good = all(result["equal"] == len(expected) and not any(result["statuses"]) for result in results)
    good &= all(death["equal"] == len(expected) and death["each_line_once_after_resuming"] for death in deaths)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
