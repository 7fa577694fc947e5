# Who may include whom. A layer may include itself and what is listed; nothing else.
# The order is the reading order of the code, bottom up.
set(MLXTAPE_LAYERS base core formats tape backends ops nn cli)
set(base_MAY "")
set(core_MAY base)
set(formats_MAY base core)              # files: what tensors, words and texts are read from and written to
set(tape_MAY base core)
set(backends_MAY base core)
set(ops_MAY base core tape)                # host files of an op
set(ops_kernel_MAY base core backends)  # *.cpu.cpp, *.cu, *.metal, *-inl.h, *.cuh
set(nn_MAY base core tape ops)             # what models are made of: ops with their weights
set(cli_MAY base core formats tape backends ops nn tests bench)  # the last two: commands that run the ops' own cases
set(MLXTAPE_GENERATED commit.h)         # headers that only the build folder has
