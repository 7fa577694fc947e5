// Everything, for programs that use the library. The library itself never includes this.
#pragma once

#include "mlxtape/base/checked.h"
#include "mlxtape/base/dtype.h"
#include "mlxtape/base/error.h"
#include "mlxtape/base/shape.h"
#include "mlxtape/core/arena.h"
#include "mlxtape/core/buffer.h"
#include "mlxtape/core/device.h"
#include "mlxtape/core/encoder.h"
#include "mlxtape/core/memory.h"
#include "mlxtape/core/registry.h"
#include "mlxtape/core/tensor.h"
#include "mlxtape/core/threads.h"
#include "mlxtape/core/trace.h"
#include "mlxtape/ops.h"
#include "mlxtape/tape/functions.h"
#include "mlxtape/tape/tape.h"
