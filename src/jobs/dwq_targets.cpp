#include "mlxtape/jobs/dwq_targets.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "hash.h"
#include "head.h"
#include "mlxtape/base/files.h"
#include "mlxtape/base/quote.h"
#include "mlxtape/formats/gguf.h"
#include "mlxtape/formats/gguf_tokenizer.h"
#include "mlxtape/formats/model_directory.h"
#include "mlxtape/formats/tokenizer.h"
#include "mlxtape/ops/sort.h"

namespace mlxtape::jobs {

namespace {

namespace fs = std::filesystem;
using formats::Json;

constexpr const char* kHash = "hash";
constexpr const char* kMadeAnew = ": delete this file, and it will be written again";
constexpr const char* kFormat = "mlxtape targets 2";

// All of a small file. Of a large one its first MiB, where the header is, and 1024 pieces of the rest, far from each other:
// a model that was trained further differs nearly everywhere.
void add_file(Hash& hash, const std::string& path) {
  constexpr std::size_t kBegin = std::size_t{1} << 20U, kPieces = 1024, kPiece = 512;
  const MappedFile file(path, "model_fingerprint");
  const std::span<const std::byte> bytes = file.bytes();
  hash.add(std::to_string(bytes.size()));
  hash.add(bytes.first(std::min(bytes.size(), kBegin)));
  if (bytes.size() <= kBegin) return;
  const std::span<const std::byte> rest = bytes.subspan(kBegin);
  if (rest.size() <= kPieces * kPiece) return hash.add(rest);
  const std::size_t step = (rest.size() - kPiece) / (kPieces - 1);
  for (std::size_t i = 0; i < kPieces; ++i) hash.add(rest.subspan(i * step, kPiece));
}

void check_plan(const TargetsPlan& plan) {
  const auto wrong = [](const std::string& what) {
    throw Error(Errc::kArgument, "targets: " + what);
  };
  if (plan.train == nullptr || plan.valid == nullptr) wrong("train and valid must be given");
  if (plan.k < 1) wrong("k must be at least 1, got " + std::to_string(plan.k));
  if (plan.train_batches < 0) {
    wrong("train_batches must be at least 0, got " + std::to_string(plan.train_batches));
  }
}

std::int64_t train_batches_of(const TargetsPlan& plan) {
  return plan.train_batches > 0 ? plan.train_batches : plan.train->per_epoch();
}

std::int64_t size_of_valid(const TargetsPlan& plan) {
  return static_cast<std::int64_t>(plan.valid->size());
}

// In the order in which differences are told: what a user sets first, what follows from it last.
Json manifest_of(const TargetsPlan& plan, std::int64_t vocabulary) {
  return Json::Object{
      {"format", kFormat},
      {"teacher", plan.teacher},
      {"tokenizer", plan.tokenizer},
      {"batch_size", plan.options.batch_size},
      {"seed", plan.options.seed},
      {"max_tokens", plan.options.max_tokens},
      {"pad_to", plan.options.pad_to},
      {"learn_prompt", plan.options.learn_prompt},
      {"k", std::min(plan.k, vocabulary)},
      {"vocabulary", vocabulary},
      {"train_batches", train_batches_of(plan)},
      {"valid_batches", size_of_valid(plan)},
      {"train_data", plan.train->fingerprint()},
      {"valid_data", fingerprint(*plan.valid)},
  };
}

std::string manifest_path(const std::string& folder) { return folder + "/manifest.json"; }

void check_manifest(const std::string& folder, const Json& want) {
  const std::string path = manifest_path(folder);
  const Json got = Json::parse(read_whole(path, "targets"), path);
  const auto differ = [&](const std::string& key, const std::string& has, const Json& asked) {
    throw Error(Errc::kArgument, path + ": " + key + " must be " + asked.dump() + ", got " +
                                     shown(has) +
                                     ": these targets were made for another run; use another "
                                     "folder, or delete this one");
  };
  for (const auto& [key, value] : want.object()) {
    const Json* found = got.find(key);
    if (found == nullptr) differ(key, "nothing", value);
    if (!(*found == value)) differ(key, found->dump(), value);
  }
}

std::string file_of(const std::string& folder, bool train, std::int64_t number) {
  char name[32];
  std::snprintf(name, sizeof name, "%010lld.safetensors", static_cast<long long>(number));
  return folder + (train ? "/train/" : "/valid/") + name;
}

BatchTargets targets_of(CommandEncoder& encoder, const models::Model& teacher, const Batch& batch,
                        std::int64_t k) {
  const Tensor h = hidden_rows(encoder, teacher, upload_tokens(encoder, batch));
  const std::int64_t count = h.dim(0), chunk = chunk_of(encoder, teacher, 0);
  BatchTargets all;
  for (std::int64_t start = 0; start < count; start += chunk) {
    const std::int64_t stop = std::min(count, start + chunk);
    const Tensor logits = head_logits(encoder, teacher, h.slice(0, start, stop));
    const ops::TopK top = ops::topk(encoder, logits, k);
    if (start == 0) {
      all.values = encoder.empty({count, k}, top.values.dtype());
      all.indices = encoder.empty({count, k}, DType::kU32);
    }
    encoder.copy(top.values, all.values.slice(0, start, stop));
    encoder.copy(top.indices, all.indices.slice(0, start, stop));
  }
  return all;
}

// What the hash of a batch's file, in its own metadata, begins with: the manifest and the batch. A file of another set, or
// one with another's name, must not be learned from, nor one of which a bit has changed on the disk.
Hash hash_for(const std::string& manifest, bool train, std::int64_t number) {
  Hash hash;
  hash.add(manifest + (train ? " train " : " valid ") + std::to_string(number));
  return hash;
}

std::string hash_of(CommandEncoder& encoder, const BatchTargets& targets, Hash hash) {
  for (const Tensor& t : {targets.values, targets.indices}) {
    std::vector<std::byte> bytes(t.bytes());
    encoder.download(t, bytes.data(), bytes.size());
    hash.add(bytes);
  }
  return hash.digits();
}

void write_batch(CommandEncoder& encoder, const std::string& path, const BatchTargets& targets,
                 const Batch& batch, const Hash& hash) {
  const Shape shape{batch.rows, batch.length, targets.values.dim(1)};
  const formats::NamedTensor tensors[] = {{"logits", targets.values.reshape(shape)},
                                          {"indices", targets.indices.reshape(shape)}};
  formats::write_safetensors(path, tensors, {{kHash, hash_of(encoder, targets, hash)}});
}

formats::SafetensorsFile open_batch(const std::string& path) {
  try {
    return formats::SafetensorsFile(path);
  } catch (const Error& e) {
    throw Error(e.code(), std::string(e.what()) + kMadeAnew);
  }
}

}  // namespace

std::string model_fingerprint(const std::string& folder) {
  Hash hash;
  hash.add(formats::read_model_config(folder).dump(-1, true));
  const formats::ModelFiles files(folder);
  for (const std::string& file : files.files()) add_file(hash, file);
  return hash.digits();
}

std::string tokenizer_fingerprint(const std::string& folder) {
  Hash hash;
  constexpr const char* kWho = "tokenizer_fingerprint";
  if (formats::is_gguf_path(folder)) {
    const auto tokenizer = formats::read_gguf_tokenizer(formats::GgufFile(folder));
    if (!tokenizer) throw Error(Errc::kIo, std::string(kWho) + ": " + folder + " has no tokenizer");
    hash.add(formats::tokenizer_files(*tokenizer, folder).tokenizer_json);
    return hash.digits();
  }
  const std::string file = formats::Tokenizer::file_in(folder);
  hash.add(read_whole(file.empty() ? folder + "/tokenizer.json" : file, kWho));
  return hash.digits();
}

WroteTargets write_targets(CommandEncoder& encoder, const models::Model& teacher,
                           const TargetsPlan& plan, const std::string& folder,
                           const WriteTargetsHooks& hooks) {
  check_plan(plan);
  const std::int64_t k = std::min(plan.k, teacher.config.plan.vocabulary);
  const Json manifest = manifest_of(plan, teacher.config.plan.vocabulary);
  if (fs::exists(manifest_path(folder))) {
    check_manifest(folder, manifest);
  } else {
    std::error_code failed;
    for (const char* split : {"/train", "/valid"}) {
      if (fs::exists(folder + split, failed) && !fs::is_empty(folder + split, failed)) {
        throw Error(Errc::kIo, folder + split +
                                   ": contains targets but no manifest.json, which records what "
                                   "they were made from; delete them, or use another folder");
      }
      fs::create_directories(folder + split, failed);
      if (failed) {
        throw Error(Errc::kIo, "targets: " + folder + split + ": " + failed.message());
      }
    }
    write_whole(manifest_path(folder), manifest.dump(2) + "\n", "targets",
                WholeFile::Links::kReplace);
  }
  const std::int64_t valid = size_of_valid(plan), all = valid + train_batches_of(plan);
  WroteTargets result;
  for (std::int64_t i = 0; i < all && !result.stopped; ++i) {
    const bool train = i >= valid;
    const std::int64_t number = train ? i - valid : i;
    const std::string path = file_of(folder, train, number);
    if (fs::exists(path)) {
      ++result.found;
    } else {
      const Batch batch =
          train ? plan.train->at(number) : (*plan.valid)[static_cast<std::size_t>(number)];
      check_batch("targets", teacher, batch);
      write_batch(encoder, path, targets_of(encoder, teacher, batch, k), batch,
                  hash_for(manifest.dump(), train, number));
      ++result.written;
    }
    if (hooks.progress) hooks.progress(i + 1, all);
    result.stopped = i + 1 < all && hooks.stop && hooks.stop();
  }
  return result;
}

Targets::Targets(std::string folder, const TargetsPlan& plan, std::int64_t vocabulary)
    : folder_(std::move(folder)), k_(std::min(plan.k, vocabulary)), vocabulary_(vocabulary) {
  check_plan(plan);
  train_batches_ = train_batches_of(plan);
  if (!fs::exists(manifest_path(folder_))) {
    throw Error(Errc::kIo,
                manifest_path(folder_) + ": missing; it records what the targets were made from");
  }
  const Json manifest = manifest_of(plan, vocabulary);
  check_manifest(folder_, manifest);
  identity_ = manifest.dump();
  const std::int64_t counts[] = {size_of_valid(plan), train_batches_};
  for (const bool train : {false, true}) {
    for (std::int64_t i = 0; i < counts[train ? 1 : 0]; ++i) {
      const std::string path = file_of(folder_, train, i);
      if (fs::exists(path)) continue;
      throw Error(Errc::kIo, path +
                                 ": missing, so the targets are incomplete; write them again "
                                 "to continue from here");
    }
  }
}

BatchTargets Targets::load(CommandEncoder& encoder, bool train, std::int64_t number,
                           const Batch& batch) const {
  const std::string path = file_of(folder_, train, number);
  const formats::SafetensorsFile file = open_batch(path);
  const Tensor values = file.tensor("logits"), indices = file.tensor("indices");
  const Shape shape{batch.rows, batch.length, k_};
  if (!(values.shape() == shape) || !(indices.shape() == shape) ||
      !is_kernel_float(values.dtype()) || indices.dtype() != DType::kU32) {
    throw Error(Errc::kIo, path + ": logits and indices must be floats and u32 of " +
                               to_string(shape) + ", got " + name_of(values.dtype()) + " " +
                               to_string(values.shape()) + " and " + name_of(indices.dtype()) +
                               " " + to_string(indices.shape()));
  }
  for (const std::uint32_t index : indices.host<std::uint32_t>()) {
    if (static_cast<std::int64_t>(index) < vocabulary_) continue;
    throw Error(Errc::kIo, path + ": an index must be below " + std::to_string(vocabulary_) +
                               ", got " + std::to_string(index));
  }
  Hash hash = hash_for(identity_, train, number);
  for (const Tensor& t : {values, indices}) {
    hash.add({static_cast<const std::byte*>(t.data()), t.bytes()});
  }
  const auto written = file.metadata().find(kHash);
  if (written == file.metadata().end() || written->second != hash.digits()) {
    throw Error(Errc::kIo,
                path + ": the content must match its hash, " +
                    (written == file.metadata().end() ? "which is missing" : written->second) +
                    ", got " + hash.digits() + kMadeAnew);
  }
  const Shape rows{batch.rows * batch.length, k_};
  return {encoder.place(values.reshape(rows)), encoder.place(indices.reshape(rows))};
}

}  // namespace mlxtape::jobs
