#include "backends/cuda/blas.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "backends/cuda/error.h"
#include "backends/cuda/library.h"

namespace mlxtape::cuda {

namespace {

// The functions that are used, found once.
struct Functions {
#define MT_BLAS_FUNCTION(name) decltype(::name)* name = cublaslt().function<decltype(::name)>(#name)
  MT_BLAS_FUNCTION(cublasLtCreate);
  MT_BLAS_FUNCTION(cublasLtGetStatusString);
  MT_BLAS_FUNCTION(cublasLtMatmul);
  MT_BLAS_FUNCTION(cublasLtMatmulAlgoGetHeuristic);
  MT_BLAS_FUNCTION(cublasLtMatmulDescCreate);
  MT_BLAS_FUNCTION(cublasLtMatmulDescDestroy);
  MT_BLAS_FUNCTION(cublasLtMatmulDescSetAttribute);
  MT_BLAS_FUNCTION(cublasLtMatmulPreferenceCreate);
  MT_BLAS_FUNCTION(cublasLtMatmulPreferenceDestroy);
  MT_BLAS_FUNCTION(cublasLtMatmulPreferenceSetAttribute);
  MT_BLAS_FUNCTION(cublasLtMatrixLayoutCreate);
  MT_BLAS_FUNCTION(cublasLtMatrixLayoutDestroy);
  MT_BLAS_FUNCTION(cublasLtMatrixLayoutSetAttribute);
#undef MT_BLAS_FUNCTION
};

const Functions& lt() {
  static const Functions functions;  // throws as long as the library is not there
  return functions;
}

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(Errc::kBackend, std::string("cuBLASLt: ") + what + " must succeed, got " +
                                  lt().cublasLtGetStatusString(status));
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF16: return CUDA_R_16F;
    case DType::kBF16: return CUDA_R_16BF;
    default: return CUDA_R_32F;
  }
}

cublasLtEpilogue_t epilogue_of(BlasEpilogue epilogue) {
  switch (epilogue) {
    case BlasEpilogue::kBias: return CUBLASLT_EPILOGUE_BIAS;
    case BlasEpilogue::kGeluTanh: return CUBLASLT_EPILOGUE_GELU;
    case BlasEpilogue::kBiasGeluTanh: return CUBLASLT_EPILOGUE_GELU_BIAS;
    default: return CUBLASLT_EPILOGUE_DEFAULT;
  }
}

bool has_bias(BlasEpilogue epilogue) {
  return epilogue == BlasEpilogue::kBias || epilogue == BlasEpilogue::kBiasGeluTanh;
}

class Layout {
 public:
  // As cuBLASLt counts, column by column: ld from one column to the next.
  Layout(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld, std::int64_t batch,
         std::int64_t stride) {
    check(
        lt().cublasLtMatrixLayoutCreate(&layout_, type_of(dtype), static_cast<std::uint64_t>(rows),
                                        static_cast<std::uint64_t>(cols), ld),
        "describing a matrix");
    const auto count = static_cast<std::int32_t>(batch);
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }
  ~Layout() { lt().cublasLtMatrixLayoutDestroy(layout_); }
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  template <class T>
  void set(cublasLtMatrixLayoutAttribute_t what, const T& value) {
    check(lt().cublasLtMatrixLayoutSetAttribute(layout_, what, &value, sizeof value),
          "describing a batch");
  }
  cublasLtMatrixLayout_t layout_ = nullptr;
};

class Operation {
 public:
  Operation() {
    check(lt().cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "describing a product");
  }
  ~Operation() { lt().cublasLtMatmulDescDestroy(operation_); }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  template <class T>
  void set(cublasLtMatmulDescAttributes_t what, const T& value) {
    check(lt().cublasLtMatmulDescSetAttribute(operation_, what, &value, sizeof value),
          "describing a product");
  }
  cublasLtMatmulDesc_t get() const { return operation_; }

 private:
  cublasLtMatmulDesc_t operation_ = nullptr;
};

class Preference {
 public:
  Preference() {
    check(lt().cublasLtMatmulPreferenceCreate(&preference_), "describing what is allowed");
  }
  ~Preference() { lt().cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t what, const T& value) {
    check(lt().cublasLtMatmulPreferenceSetAttribute(preference_, what, &value, sizeof value),
          "describing what is allowed");
  }
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  cublasLtMatmulPreference_t preference_ = nullptr;
};

constexpr int kCandidates = 8;

// The largest power of two, up to 256, that divides the address.
std::uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p) | 256U;
  return static_cast<std::uint32_t>(address & (~address + 1));
}

struct Alignments {
  std::uint32_t a, b, added, c;
};

// How one shape is done. c [m, n] by rows is its transpose [n, m] by columns, which is bᵀ · aᵀ: b comes first.
class Plan {
 public:
  Plan(cublasLtHandle_t handle, const BlasShape& s, const Alignments& aligned,
       std::size_t workspace, const void* bias)
      : first_(s.in, s.b_col == 1 ? s.n : s.k, s.b_col == 1 ? s.k : s.n,
               s.b_col == 1 ? s.b_row : s.b_col, s.batch, s.b_batch),
        second_(s.in, s.a_col == 1 ? s.k : s.m, s.a_col == 1 ? s.m : s.k,
                s.a_col == 1 ? s.a_row : s.a_col, s.batch, s.a_batch),
        result_(s.out, s.n, s.m, s.n, s.batch, s.c_batch) {
    const cublasOperation_t as_is = CUBLAS_OP_N, turned = CUBLAS_OP_T;
    operation_.set(CUBLASLT_MATMUL_DESC_TRANSA, s.b_col == 1 ? as_is : turned);
    operation_.set(CUBLASLT_MATMUL_DESC_TRANSB, s.a_col == 1 ? as_is : turned);
    operation_.set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(s.epilogue));
    if (has_bias(s.epilogue)) {
      operation_.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                     static_cast<std::int32_t>(type_of(s.out)));
      operation_.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    Preference allowed;
    allowed.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
    allowed.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned.b);
    allowed.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned.a);
    allowed.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned.added);
    allowed.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned.c);
    // Parts of k may be summed apart, in f32 and in order; not in place, in whatever order they come, and not
    // in 16 bits.
    const std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    allowed.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
    const cublasStatus_t status = lt().cublasLtMatmulAlgoGetHeuristic(
        handle, operation_.get(), first_.get(), second_.get(), result_.get(), result_.get(),
        allowed.get(), kCandidates, candidates_.data(), &count_);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
      count_ = 0;
    } else {
      check(status, "choosing how to multiply");
    }
  }

  bool run(cublasLtHandle_t handle, const BlasShape& s, const BlasMemory& m, float beta,
           cudaStream_t stream) {
    if (has_bias(s.epilogue)) operation_.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, m.bias);
    const float alpha = 1;
    for (; chosen_ < count_; ++chosen_) {
      const cublasLtMatmulHeuristicResult_t& how = candidates_[static_cast<std::size_t>(chosen_)];
      if (how.state != CUBLAS_STATUS_SUCCESS || how.workspaceSize > m.workspace_bytes) continue;
      const cublasStatus_t status = lt().cublasLtMatmul(
          handle, operation_.get(), &alpha, m.b, first_.get(), m.a, second_.get(), &beta, m.added,
          result_.get(), m.c, result_.get(), &how.algo, m.workspace, m.workspace_bytes, stream);
      if (status == CUBLAS_STATUS_SUCCESS) return true;
      if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) {
        check(status, "the product");
      }
    }
    return false;
  }

 private:
  Operation operation_;
  Layout first_, second_, result_;
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> candidates_{};
  int count_ = 0;
  int chosen_ = 0;  // those before it do not work
};

// Everything that a plan depends on.
using Key = std::array<std::int64_t, 20>;

struct Cache {
  std::mutex mutex;
  std::map<int, cublasLtHandle_t> handles;  // by device
  std::map<Key, std::unique_ptr<Plan>> plans;
};

// Never destroyed: what cuBLASLt started must outlive every static object.
Cache& cache() {
  static auto* const made = new Cache;
  return *made;
}

}  // namespace

bool blas_product(const BlasShape& s, const BlasMemory& m, float beta, cudaStream_t stream) {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  BlasMemory memory = m;
  if (beta == 0) memory.added = m.c;  // must be an address, though nothing is read
  const Alignments aligned{alignment_of(memory.a), alignment_of(memory.b),
                           alignment_of(memory.added), alignment_of(memory.c)};
  const Key key{device,
                s.m,
                s.n,
                s.k,
                s.a_row,
                s.a_col,
                s.b_row,
                s.b_col,
                s.batch,
                s.a_batch,
                s.b_batch,
                s.c_batch,
                static_cast<std::int64_t>(s.in) << 16 | static_cast<std::int64_t>(s.out),
                static_cast<std::int64_t>(s.epilogue),
                aligned.a,
                aligned.b,
                aligned.added,
                aligned.c,
                static_cast<std::int64_t>(m.workspace_bytes),
                beta == 0 ? 0 : 1};
  Cache& kept = cache();
  const std::lock_guard lock(kept.mutex);
  cublasLtHandle_t& handle = kept.handles[device];
  if (handle == nullptr) check(lt().cublasLtCreate(&handle), "starting");
  std::unique_ptr<Plan>& plan = kept.plans[key];
  if (plan == nullptr) {
    plan = std::make_unique<Plan>(handle, s, aligned, m.workspace_bytes, m.bias);
  }
  return plan->run(handle, s, memory, beta, stream);
}

std::size_t blas_workspace(std::int64_t m, std::int64_t n, std::int64_t batch) {
  // Only parts of k that are summed apart need any, and only where the result has too few tiles for all
  // multiprocessors. A graph keeps the memory of each of its products, so no more than that.
  constexpr std::int64_t kMost = std::int64_t{32} << 20;  // as advised for this generation
  constexpr std::int64_t kTile = 128, kTiles = 2 * 132, kParts = 16;
  const double tiles = static_cast<double>((m + kTile - 1) / kTile) *
                       static_cast<double>((n + kTile - 1) / kTile) * static_cast<double>(batch);
  if (tiles >= kTiles) return 0;
  // Below kTiles tiles, this cannot overflow.
  const std::int64_t bytes = m * n * batch * 4 * kParts;
  return static_cast<std::size_t>(std::min(kMost, (bytes + (1 << 20) - 1) >> 20 << 20));
}

}  // namespace mlxtape::cuda
