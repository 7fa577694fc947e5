// Metal's standard library in C++20: what every emulated kernel includes in place of <metal_stdlib> and its like.
#pragma once

#include "backends/metal/emulator/msl/atomics.h"
#include "backends/metal/emulator/msl/matrices.h"
