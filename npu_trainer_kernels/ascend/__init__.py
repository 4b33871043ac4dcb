"""The real Ascend compiler without an Ascend card: lower a kernel, plan its on-chip memory, run what was lowered.

    Specialization.of(kernel, args, constexprs, chip)   a launch as the compiler sees it        (lower.py)
    lower(spec) -> MLIR                                 triton-ascend's own passes              (lower.py)
    plan(spec) -> MemoryPlan, violations(plan)          bishengir-compile's memory planner      (plan.py)
    execute(spec, grid, args, level) -> Traffic         the lowered kernel on CPU tensors       (execute.py)
    Recorder, lowering_launcher                         launchers for `ops.launch.use_launcher` (launcher.py)
    trace(spec, grid, args) -> events                   what one program of a plan does         (trace.py)
    Case, collect, failures                             the gate                                (gate.py)
    write_report, report_is_current                     its page                                (report.py)
    python -m npu_trainer_kernels.ascend.sweep          which tile of a kernel overlaps best    (sweep.py)

It needs the extra `ascend`; executing needs LLVM 19 and a C compiler too. What this cannot show:
races between cores, a missing synchronisation, the accuracy of the chip's own exp and log, and time.
"""
