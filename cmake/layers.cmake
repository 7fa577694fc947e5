# Who may include whom. A layer may include itself and what is listed; nothing else.
# The order is the reading order of the code, bottom up.
set(MLXTAPE_LAYERS base core formats tape backends ops nn models jobs demo bench cli)
set(base_MAY "")
set(core_MAY base)
set(formats_MAY base core)              # files: what tensors, words and texts are read from and written to
set(tape_MAY base core)
set(backends_MAY base core)
set(ops_MAY base core tape)                # host files of an op
set(ops_kernel_MAY base core backends)  # *.cpu.cpp, *.cu, *.metal, *-inl.h, *.cuh
set(nn_MAY base core tape ops)             # what models are made of: ops with their weights
set(models_MAY base core formats tape ops nn)      # architectures: blocks in their order, and their files
set(jobs_MAY base core formats tape ops nn models)  # what users want done: a config and a run
set(demo_MAY base core formats tape ops nn models jobs)  # what `mlxtape demo` trains and shows; no part of the library
set(bench_MAY base core formats tape backends ops nn models jobs)
set(ops_bench_MAY base core tape bench)    # *_bench.cpp of an op: its rows of the benchmark
set(cli_MAY base core formats tape backends ops nn models jobs demo bench)
# What asks a device for its traits and its kernels, and never for its backend's name; host files of ops as well.
set(MLXTAPE_ASKS_DEVICES ops nn models jobs demo formats)
set(MLXTAPE_GENERATED commit.h)         # headers that only the build folder has
