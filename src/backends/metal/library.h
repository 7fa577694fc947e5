// Library: from the texts of kernels to pipelines. A text is compiled by the system when its first kernel is asked for; a
// pipeline, which is one function with its constants, when it is first launched. What the system made of them is kept on
// disk for the next process (mlxtape/core/source_kernel.h: set_kernel_cache), one archive for each text, version of the
// system and GPU.
//
// Threads    Every member may be called from any thread at any time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "backends/metal/calls.h"
#include "backends/metal/dispatch.h"
#include "mlxtape/base/error.h"

namespace mlxtape::metal {

// Kernels as they are written, with what they include: made at build time from x.metal.
struct Text {
  const char* name;  // of the file, without .metal
  const char* source;
  std::size_t bytes;
};

struct Constant {
  unsigned long index = 0;
  ConstantType type = ConstantType::kBool;
  std::uint32_t bits = 0;
  bool operator==(const Constant&) const = default;
};

// Which pipeline. base and suffix are literals of the program: "rms_norm_fwd" and "bf16", or no suffix.
struct PipelineKey {
  static constexpr std::size_t kMostConstants = 8;
  const Text* text = nullptr;
  const char* base = nullptr;
  const char* suffix = nullptr;
  std::size_t constant_count = 0;
  std::array<Constant, kMostConstants> constants{};
  bool operator==(const PipelineKey&) const = default;
  std::string function() const;
};

class Library {
 public:
  // has_math_mode: the system knows setMathMode, as macOS 15 does.
  Library(Id device, bool has_math_mode)
      : device_(Retained::share(device)), has_math_mode_(has_math_mode) {}

  // Throws kBackend with the system's words where it does not compile.
  const Pipeline& pipeline(const PipelineKey& key);
  // One kernel of a user's text; throws kArgument with the compiler's words.
  std::unique_ptr<Pipeline> compile(const std::string& source, const std::string& entry);

  // Writes what is new to the disk. What cannot be kept is compiled again next time.
  void save() noexcept;

 private:
  struct Loaded {
    Retained library;
    Retained archive;  // null: nothing is kept
    std::string path;
    bool has_new = false;
  };
  struct Hash {
    std::size_t operator()(const PipelineKey& key) const;
  };

  Retained compile_text(const std::string& source, Errc code, const std::string& what) const;
  Loaded& load(const Text& text);
  void open_archive(Loaded& loaded, const Text& text) const;
  std::unique_ptr<Pipeline> make(Loaded& loaded, const PipelineKey& key);
  std::unique_ptr<Pipeline> describe(Retained state, const std::string& name) const;

  Retained device_;
  bool has_math_mode_;
  mutable std::shared_mutex mutex_;
  std::map<const Text*, Loaded> texts_;
  std::unordered_map<PipelineKey, std::unique_ptr<Pipeline>, Hash> pipelines_;
};

}  // namespace mlxtape::metal
