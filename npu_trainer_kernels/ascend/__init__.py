"""Runs the Ascend compiler without an Ascend card: lowers kernels, plans their on-chip memory, executes them on a CPU.

    Specialization.of(kernel, args, constexprs, chip)   a launch as the compiler sees it        (lower.py)
    lower(spec) -> MLIR                                 triton-ascend's own passes              (lower.py)
    plan(spec) -> MemoryPlan, violations(plan)          bishengir-compile's memory planner      (plan.py)
    execute(spec, grid, args, level) -> Traffic         the lowered kernel on CPU tensors       (execute.py)
    LaunchRecorder, lowering_launcher                   launchers for `ops.launch.use_launcher` (launcher.py)
    trace(spec, grid, args) -> events                   the instructions of one program         (trace.py)
    GateCase, collect, failures                         the Ascend gate                         (gate.py)
    write_report, report_is_current                     its page in the documentation           (report.py)
    python -m npu_trainer_kernels.ascend.sweep          compares the tiles of a kernel          (sweep.py)

`npu-kernels compile` imports `cases`, `gate` and `toolchain` from here, each when it is needed: only `toolchain` can be
imported without the compiler, and it says which part is missing.

The package needs the extra `ascend`; executing needs LLVM 19 and a C compiler too. It cannot show races between cores,
missing synchronisation, the accuracy of the chip's own exp and log, or times.
"""
