#!/usr/bin/env python3
"""What the TPU compiler makes of our programs, without a TPU: memory, traffic, collectives, copies, seconds.

python scripts/tpu_compile.py [--target llama-3.1-8b] [--topology v5e:2x4] [--programs "pass 1" "pass 8" ...] [--output FILE.json]

To be run in an environment of its own: ``pip install 'jax[tpu]'`` beside the project. No weights are needed, no memory for them
either: programs are compiled from shapes. Programs are ``prefill``, ``pass N`` (a pass of the target over N tokens of every row),
``draft pass``, and rounds of the engine: ``plain``, ``chain``, ``tree``, ``medusa``, ``eagle``. ``draft pass split``, ``chain
split`` and ``tree split`` are those of a draft model that is split as the target is.
"""

import argparse
import os
import re
import sys
import time

PROGRAMS = ["prefill", "pass 1", "pass 8", "draft pass", "plain", "chain", "medusa"]
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
# Several processes may compile at a time: none of them has a TPU.
ENVIRONMENT |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
ACCELERATORS = {"v4": "v4-8", "v5e": "v5litepod-8", "v5p": "v5p-8", "v6e": "v6e-8"}


def scenario_of(length: int, slots: int):
    """A round of all rows that draft as much as they may, with a temperature and no other setting."""
    from tpu_hlo import Scenario

    turns = {r"/catch_up/while": 0, r"/draft_steps/while": length - 1, r"/judge/while": length + 1, r"/commit/.*while": slots}

    def trips(loop):
        if layers := re.search(r"/layers_(\d+)/while$", loop.scope):
            return int(layers[1])
        return next((number for pattern, number in turns.items() if re.search(pattern + "$", loop.scope)), None)

    def branch(condition):
        return 0 if re.search(r"/settings/cond[^/]*$", condition.scope) else None

    return Scenario(trips, branch)


def measure(case, name: str, large: float, keep: str | None) -> dict:
    """Compiles one program and says what it does."""
    from tpu_hlo import Program
    from tpu_programs import MEMORY

    start = time.perf_counter()
    lowered = case.lowered(name)
    traced, used = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    seconds = {"trace_seconds": traced - start, "compile_seconds": time.perf_counter() - traced}
    # Of all threads: little changed by what else the machine does.
    seconds["compile_cpu_seconds"] = time.process_time() - used
    seconds = {what: round(value, 1) for what, value in seconds.items()}
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if keep:
        os.makedirs(keep, exist_ok=True)
        with open(
            os.path.join(
                keep, f"{case.target}-{case.topology}-{case.slots}-{name}{'-scanned' * case.scan_layers}.txt".replace(" ", "_")
            ),
            "w",
        ) as file:
            file.write(text)
    program, scenario = Program(text), scenario_of(case.length, case.slots)
    moves = program.moves(large, scenario)
    return seconds | {
        "memory": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        "memory_of_chip": MEMORY[case.topology.split(":")[0]] * 2**30,
        "temporary": memory.temp_size_in_bytes,
        "bytes_accessed_by_the_compilers_count": int(compiled.cost_analysis()["bytes accessed"]),
        "bytes": int(program.bytes(scenario)),
        "collectives": program.collectives(scenario),
        "moves": moves,
        "float32_moves": sum(move["bytes"] for move in moves if move["array"].startswith("f32") and move["place"] == "in HBM"),
    }


def ratios_of(results: dict, case) -> dict:
    """What the goals are about, where both sides were compiled."""
    from tpu_programs import TREE, TREE_LEVELS

    length = case.length
    size = {name: result["bytes"] for name, result in results.items()}
    ratios, whole, of_tree = {}, f"pass {length + 1}", f"pass {TREE.size}"
    if {"pass 1", whole} <= size.keys():
        ratios[f"{whole} / pass 1"] = size[whole] / size["pass 1"]
    if {"pass 1", "plain"} <= size.keys():
        ratios["plain round / pass 1"] = size["plain"] / size["pass 1"]
    for split in ("", " split"):
        chain, draft = f"chain{split}", f"draft pass{split}"
        if {chain, draft, whole} <= size.keys():
            ratio = size[chain] / (length * size[draft] + size[whole])
            ratios[f"chain round{split} / ({length} draft passes{split} + {whole})"] = ratio
        tree = f"tree{split}"
        if {tree, draft, of_tree} <= size.keys():
            ratio = size[tree] / (TREE_LEVELS * size[draft] + size[of_tree])
            ratios[f"tree round{split} / ({TREE_LEVELS} draft passes{split} + {of_tree})"] = ratio
    for heads in ("medusa", "eagle"):
        if {heads, of_tree} <= size.keys():
            ratios[f"{heads} round / (least of drafting + {of_tree})"] = size[heads] / (
                case.least_of_heads(heads) + size[of_tree]
            )
    return {name: round(ratio, 4) for name, ratio in ratios.items()}


def table_of(title: str, results: dict):
    """The same for people."""
    from rich.table import Table

    table = Table(title=title)
    for column in (
        "program",
        "memory GiB",
        "of the chip",
        "MB per round",
        "compiler's MB",
        "collectives",
        "large copies",
        "compile s",
    ):
        table.add_column(column, justify="left" if column in ("program", "collectives", "large copies") else "right")
    for name, result in results.items():
        moves = [f"{move['count']:g} {move['kind']} {move['array']} {move['place']}" for move in result["moves"]]
        collectives = [
            f"{entry['count']:g} {kind} {entry['bytes'] / 1e6:.1f} MB" for kind, entry in result["collectives"].items()
        ]
        table.add_row(
            name,
            f"{result['memory'] / 2**30:.2f}",
            f"{result['memory'] / result['memory_of_chip']:.0%}",
            f"{result['bytes'] / 1e6:.0f}",
            f"{result['bytes_accessed_by_the_compilers_count'] / 1e6:.0f}",
            "\n".join(collectives),
            "\n".join(moves[:6]) or "none",
            f"{result['compile_seconds']:.0f}",
        )
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--model", type=int, help="devices that share the target; without it all")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=2048)
    parser.add_argument("--length", type=int, default=7, help="draft tokens of a chain")
    parser.add_argument("--layers", type=int, help="of target and draft model, at most; without it all")
    parser.add_argument("--scan-layers", action="store_true", help="layers in a loop")
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, metavar="NAME")
    parser.add_argument("--large", type=float, default=4e6, help="bytes from which on a copy is listed")
    parser.add_argument("--keep", metavar="FOLDER", help="where the compiled programs' text goes")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    kind = arguments.topology.split(":")[0]
    if kind not in ACCELERATORS:
        parser.error(f"--topology is {arguments.topology}; it must be like v5e:2x4, of one of {', '.join(ACCELERATORS)}")
    # Before JAX starts.
    os.environ.update(ENVIRONMENT, TPU_ACCELERATOR_TYPE=ACCELERATORS[kind])
    from record import record
    from rich.console import Console
    from tpu_programs import TARGETS, Case

    if arguments.target not in TARGETS:
        parser.error(f"--target is {arguments.target}; it must be one of {', '.join(TARGETS)}")
    names = ("target", "topology", "model", "slots", "capacity", "length", "layers", "scan_layers")
    case = Case(**{name: getattr(arguments, name) for name in names})
    results = {}
    for name in arguments.programs:
        results[name] = measure(case, name, arguments.large, arguments.keep)
        print(f"{name}: {results[name]['compile_seconds']} s to compile", file=sys.stderr, flush=True)
    mesh = case.mesh()
    title = f"{case.target} on {case.topology}, {dict(mesh.shape)}, {case.slots} slots of {case.capacity} tokens"
    if case.layers:
        title += f", {case.layers} layers"
    if case.scan_layers:
        title += ", layers in a loop"
    Console(stderr=True, width=180).print(table_of(title, results))
    ratios = ratios_of(results, case)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}", file=sys.stderr)
    record(" ".join(["python", *sys.argv]), {"mesh": dict(mesh.shape), "ratios": ratios, "programs": results}, arguments.output)


if __name__ == "__main__":
    main()
