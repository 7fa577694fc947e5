#include "backends/metal/library.h"

#include <unistd.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

#include <cstdio>
#include <filesystem>

#include "mlxtape/base/error.h"
#include "mlxtape/core/source_kernel.h"

namespace mlxtape::metal {

namespace fs = std::filesystem;

namespace {

constexpr unsigned long kFailOnMiss = 4;  // MTLPipelineOptionFailOnBinaryArchiveMiss

std::uint64_t hash_of(std::string_view bytes, std::uint64_t hash = 0xcbf29ce484222325) {  // FNV-1a
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

// What makes machine code of another system useless.
std::string system_version() {
#ifdef __APPLE__
  char build[64] = {};
  std::size_t size = sizeof build - 1;
  if (sysctlbyname("kern.osversion", build, &size, nullptr, 0) == 0) return build;
#endif
  return "unknown";
}

}  // namespace

std::string PipelineKey::function() const {
  return suffix == nullptr ? base : std::string(base) + "_" + suffix;
}

std::size_t Library::Hash::operator()(const PipelineKey& key) const {
  auto hash = reinterpret_cast<std::uintptr_t>(key.base) * 0x9E3779B97F4A7C15;
  hash ^= reinterpret_cast<std::uintptr_t>(key.suffix) + (hash >> 29U);
  for (std::size_t i = 0; i < key.constant_count; ++i) {
    hash = (hash ^ key.constants[i].index ^ (std::uint64_t{key.constants[i].bits} << 8U)) *
           0x100000001b3;
  }
  return hash;
}

Retained Library::compile_text(const std::string& source, Errc error_code,
                               const std::string& what) const {
  const AutoreleasePool pool;
  const Retained options = metal::make("MTLCompileOptions");
  set_language_version(options.get(), language_version(3, 1));
  // Safe: NaN and infinity are numbers like others and sums stay in their order. The system's default is fast.
  if (has_math_mode_) {
    set_math_mode(options.get(), kMathSafe);
    set_math_functions(options.get(), kFunctionsPrecise);
  } else {
    set_fast_math(options.get(), false);
  }
  Id error = nullptr;
  Retained library = new_library(device_.get(), text(source.c_str()), options.get(), &error);
  if (!library) throw Error(error_code, what + " must compile, got " + description(error));
  return library;
}

std::unique_ptr<Pipeline> Library::describe(Retained state, const std::string& name) const {
  constexpr unsigned long kSimdWidth = 32;
  auto pipeline = std::make_unique<Pipeline>();
  pipeline->name = name;
  pipeline->max_threads = max_threads(state.get());
  pipeline->group_memory = group_memory(state.get());
  const unsigned long width = simd_width(state.get());
  if (width != kSimdWidth) {
    throw Error(Errc::kBackend, "metal: " + name + " must run in simdgroups of 32 threads, got " +
                                    std::to_string(width));
  }
  pipeline->state = std::move(state);
  return pipeline;
}

std::unique_ptr<Pipeline> Library::compile(const std::string& source, const std::string& entry) {
  const AutoreleasePool pool;
  const Retained library = compile_text(source, Errc::kArgument, "the source of " + entry);
  const Retained constants = metal::make("MTLFunctionConstantValues");
  Id error = nullptr;
  const Retained function = new_function(library.get(), entry.c_str(), constants.get(), &error);
  if (!function) {
    throw Error(Errc::kArgument,
                "the source must have a kernel " + entry + ", got " + description(error));
  }
  Retained state = new_pipeline(device_.get(), function.get(), &error);
  if (!state) {
    throw Error(Errc::kArgument,
                "the kernel " + entry + " must compile, got " + description(error));
  }
  return describe(std::move(state), entry);
}

// ---- ours ----

const Pipeline& Library::pipeline(const PipelineKey& key) {
  {
    const std::shared_lock lock(mutex_);
    const auto found = pipelines_.find(key);
    if (found != pipelines_.end()) return *found->second;
  }
  const std::unique_lock lock(mutex_);
  std::unique_ptr<Pipeline>& made = pipelines_[key];
  if (!made) {
    try {
      made = make(load(*key.text), key);
    } catch (...) {
      pipelines_.erase(key);
      throw;
    }
  }
  return *made;
}

Library::Loaded& Library::load(const Text& text) {
  Loaded& loaded = texts_[&text];
  if (loaded.library) return loaded;
  loaded.library = compile_text(std::string(text.source, text.bytes), Errc::kBackend,
                                std::string("metal: the kernels of ") + text.name + ".metal");
  open_archive(loaded, text);
  return loaded;
}

void Library::open_archive(Loaded& loaded, const Text& text) const {
  const std::string folder = kernel_cache();
  if (folder.empty()) return;
  const AutoreleasePool pool;
  const Retained descriptor = metal::make("MTLBinaryArchiveDescriptor");
  if (!descriptor) return;
  std::uint64_t hash = hash_of({text.source, text.bytes});
  hash = hash_of(system_version(), hash_of(device_name(device_.get()), hash));
  char name[64];
  std::snprintf(name, sizeof name, "/%016llx.metalarchive", static_cast<unsigned long long>(hash));
  loaded.path = folder + name;
  std::error_code failed;
  Id error = nullptr;
  if (fs::is_regular_file(loaded.path, failed)) {
    set_url(descriptor.get(), file_url(loaded.path.c_str()));
    loaded.archive = new_archive(device_.get(), descriptor.get(), &error);
    if (loaded.archive) return;
    set_url(descriptor.get(), nullptr);  // damaged: it is made again
  }
  loaded.archive = new_archive(device_.get(), descriptor.get(), &error);
}

std::unique_ptr<Pipeline> Library::make(Loaded& loaded, const PipelineKey& key) {
  const AutoreleasePool pool;
  const std::string name = key.function();
  const Retained constants = metal::make("MTLFunctionConstantValues");
  for (std::size_t i = 0; i < key.constant_count; ++i) {
    const Constant& constant = key.constants[i];
    set_constant(constants.get(), &constant.bits, constant.type, constant.index);
  }
  Id error = nullptr;
  const Retained function =
      new_function(loaded.library.get(), name.c_str(), constants.get(), &error);
  if (!function) {
    throw Error(Errc::kBackend, std::string("metal: ") + key.text->name + ".metal must have " +
                                    name + ", got " + description(error));
  }
  const auto checked = [&](Retained state) {
    if (state) return describe(std::move(state), name);
    throw Error(Errc::kBackend, "metal: " + name + " must compile, got " + description(error));
  };
  if (!loaded.archive) return checked(new_pipeline(device_.get(), function.get(), &error));
  const Retained descriptor = metal::make("MTLComputePipelineDescriptor");
  set_function(descriptor.get(), function.get());
  set_archives(descriptor.get(), array_with(loaded.archive.get()));
  Retained state = new_pipeline_of(device_.get(), descriptor.get(), kFailOnMiss, &error);
  if (state) return describe(std::move(state), name);
  auto pipeline = checked(new_pipeline_of(device_.get(), descriptor.get(), 0, &error));
  if (add_to_archive(loaded.archive.get(), descriptor.get(), &error)) loaded.has_new = true;
  return pipeline;
}

void Library::save() noexcept {
  try {
    const std::unique_lock lock(mutex_);
    const AutoreleasePool pool;
    for (auto& [text, loaded] : texts_) {
      if (!std::exchange(loaded.has_new, false)) continue;
      std::error_code failed;
      fs::create_directories(fs::path(loaded.path).parent_path(), failed);
      const std::string beside = loaded.path + "." + std::to_string(::getpid());
      Id error = nullptr;
      if (write_archive(loaded.archive.get(), file_url(beside.c_str()), &error)) {
        fs::rename(beside, loaded.path, failed);
      }
      fs::remove(beside, failed);
    }
  } catch (const std::exception&) {  // no room for a name: not kept
  }
}

}  // namespace mlxtape::metal
