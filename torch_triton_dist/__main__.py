"""`python -m torch_triton_dist <command>`: the project's commands."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command that `arguments` (default: those of the process) name. Returns the exit status."""
    about = "torch.compile extension: a matmul and its collective become one distributed Triton kernel."
    parser = argparse.ArgumentParser(prog="python -m torch_triton_dist", description=about)
    commands = parser.add_subparsers(dest="command", metavar="command")
    commands.add_parser("doctor", help="what this machine offers, and what is missing")
    demo = commands.add_parser("demo", help="train a small Llama-style model on several ranks, with and without the extension")

    run = commands.add_parser("run", help="start a script on several ranks: on the GPUs of this machine, or on its CPU")
    bench = commands.add_parser("bench", help="time the fused kernels against the unfused form, other libraries and the bound")
    tune = commands.add_parser("tune", help="measure where fusing pays on this machine; compilations go by it from then on")

    # Only the command that runs imports what it needs: `--help` is instant, and `doctor` works where torch does not.
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["demo"]:
        from . import demo as demo_module

        demo_module.add_arguments(demo)
    elif words[:1] == ["bench"]:
        from . import bench as bench_module

        bench_module.add_arguments(bench)
    elif words[:1] == ["tune"]:
        from .tuning import command as tune_module

        tune_module.add_arguments(tune)
    elif words[:1] == ["run"]:
        from . import launcher

        launcher.add_arguments(run)
    options = parser.parse_args(words)
    if options.command == "bench":
        return bench_module.main(options, words[1:])
    if options.command == "tune":
        return tune_module.main(options, words[1:])
    if options.command == "run":
        return launcher.main(options)
    if options.command == "demo":
        return demo_module.main(options)
    if options.command == "doctor":
        from . import doctor as doctor_module

        return doctor_module.main()
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
