#include "mlxtape/formats/model_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <functional>
#include <thread>

#include "formats/support.h"
#include "mlxtape/core/device.h"

namespace mlxtape::formats {
namespace {

namespace fs = std::filesystem;

// count floats: first, first + 1, ...
Tensor floats(std::int64_t count, float first) {
  const Tensor t = Device::cpu().zeros({count}, DType::kF32);
  for (float& value : t.host<float>()) value = first++;
  return t;
}

ModelToSave small_model() {
  ModelToSave model;
  model.tensors = {{"b", floats(4, 1)},
                   {"a", floats(2, 5)},
                   {"c", floats(3, 7)},
                   {"d", floats(10, 10)},
                   {"e", floats(1, 20)}};
  model.config =
      Json::Object{{"vocab_size", 7}, {"model_type", "qwen3_next"}, {"rms_norm_eps", 1e-6}};
  return model;
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

std::string said(const TempFolder& folder, const std::function<void()>& call,
                 Errc code = Errc::kIo) {
  return message_of(call, code, folder / "");
}

TEST(ModelDirectory, ATensorLargerThanAShardHasOneAlone) {
  const TempFolder folder;
  ModelToSave model = small_model();
  const Tensor large = floats(10, 1), small = floats(2, 1);
  model.tensors = {{"a", large}, {"b", small}, {"c", small}, {"d", small}};
  model.shard_bytes = 24;  // a; b, c and d
  save_model(folder / "two", model);
  const Json index =
      Json::parse(read_whole(folder / "two/model.safetensors.index.json", "test"), "index");
  const Json& files = *index.find("weight_map");
  EXPECT_EQ(files.find("a")->string(), "model-00001-of-00002.safetensors");
  for (const char* name : {"b", "c", "d"}) {
    EXPECT_EQ(files.find(name)->string(), "model-00002-of-00002.safetensors");
  }
}

TEST(ModelDirectory, OneFileOrShards) {
  const TempFolder folder;
  ModelToSave model = small_model();
  save_model(folder / "one", model);
  EXPECT_EQ(names_in(folder / "one"), (std::vector<std::string>{"config.json", "model.safetensors",
                                                                "model.safetensors.index.json"}));
  model.shard_bytes = 24;  // b and a; c; d, which has more; e
  model.parameters = 123;
  save_model(folder / "deep/er/four/", model);
  const fs::path four = folder / "deep/er/four";
  EXPECT_EQ(names_in(four),
            (std::vector<std::string>{
                "config.json", "model-00001-of-00004.safetensors",
                "model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors",
                "model-00004-of-00004.safetensors", "model.safetensors.index.json"}));
  EXPECT_EQ(names_in(folder / "deep/er").size(), 1U);
  EXPECT_EQ(read_whole(four / "config.json", "test"),
            "{\n    \"model_type\": \"qwen3_next\",\n    \"rms_norm_eps\": 1e-06,\n    "
            "\"vocab_size\": 7\n}");
  EXPECT_EQ(read_whole(four / "model.safetensors.index.json", "test"), R"({
    "metadata": {
        "total_parameters": 123,
        "total_size": 80
    },
    "weight_map": {
        "a": "model-00001-of-00004.safetensors",
        "b": "model-00001-of-00004.safetensors",
        "c": "model-00002-of-00004.safetensors",
        "d": "model-00003-of-00004.safetensors",
        "e": "model-00004-of-00004.safetensors"
    }
})");
  const Json index =
      Json::parse(read_whole(folder / "one/model.safetensors.index.json", "test"), "index");
  EXPECT_EQ(index.find("metadata")->find("total_parameters")->integer(), 20);

  for (const std::string path : {"one", "one/model.safetensors", "deep/er/four"}) {
    const ModelFiles files(folder / path);
    EXPECT_EQ(files.names(), (std::vector<std::string>{"a", "b", "c", "d", "e"}));
    EXPECT_EQ(files.total_bytes(), 80U);
    EXPECT_EQ(files.files().size(), path == "deep/er/four" ? 4U : 1U);
    EXPECT_EQ(SafetensorsFile(files.files()[0]).metadata().at("format"), "mlx");
    EXPECT_TRUE(files.has("d"));
    EXPECT_FALSE(files.has("f"));
    EXPECT_EQ(files.info("d").shape, Shape{10});
    for (const NamedTensor& item : model.tensors) {
      const auto got = files.tensor(item.name).host<float>();
      const auto want = item.tensor.host<float>();
      EXPECT_TRUE(std::equal(got.begin(), got.end(), want.begin(), want.end())) << item.name;
    }
  }
  EXPECT_EQ(read_model_config(folder / "one").find("vocab_size")->integer(), 7);
}

TEST(ModelDirectory, TakesEveryFileThatIsNamedLikeWeights) {
  const TempFolder folder;
  const auto write = [&](const std::string& name, const std::string& tensor) {
    write_safetensors(folder / name, std::vector<NamedTensor>{{tensor, floats(1, 1)}});
  };
  write("model.safetensors", "a");
  write("model-extra.safetensors", "b");
  write("adapter.safetensors", "c");
  write("model.safetensors.tmp1", "d");
  fs::create_directory(folder / "model-folder.safetensors");
  EXPECT_EQ(ModelFiles(folder.path).names(), (std::vector<std::string>{"a", "b"}));
  write("model-twice.safetensors", "a");
  EXPECT_EQ(said(folder, [&] { ModelFiles files(folder.path); }),
            "model directory: tensor \"a\" must be in one file, got model-twice.safetensors and "
            "model.safetensors");
}

TEST(ModelDirectory, SaysWhatIsMissing) {
  const TempFolder folder;
  fs::create_directory(folder / "m");
  EXPECT_EQ(said(folder, [&] { ModelFiles files(folder / "m"); }),
            "model directory: m must hold model*.safetensors, got none");
  EXPECT_EQ(said(folder, [&] { ModelFiles files(folder / "none"); }),
            "safetensors: none must be readable, got No such file or directory");
  EXPECT_EQ(said(folder, [&] { read_model_config(folder / "m"); }),
            "model directory: m/config.json must be readable, got No such file or directory");
  put(folder / "m/config.json", "[]");
  EXPECT_EQ(said(folder, [&] { read_model_config(folder / "m"); }),
            "model directory: m/config.json must be an object, got another value");
  put(folder / "m/config.json", "{");
  EXPECT_EQ(said(folder, [&] { read_model_config(folder / "m"); }),
            "model directory: m/config.json: byte 1: must be a key, got the end of the text");
  fs::create_symlink("gone", folder / "m/model-1.safetensors");  // a download that is not complete
  EXPECT_EQ(said(folder, [&] { ModelFiles files(folder / "m"); }),
            "safetensors: m/model-1.safetensors must be readable, got No such file or directory");
  save_model(folder / "good", small_model());
  const ModelFiles files(folder / "good");
  EXPECT_EQ(said(folder, [&] { files.tensor("x"); }),
            "model directory: good must hold tensor \"x\", got no such name");
}

TEST(ModelDirectory, CompanionsComeAlong) {
  const TempFolder folder;
  fs::create_directories(folder / "from/tokenizer_folder");
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json",
        "config.json", "model.safetensors", "model.safetensors.index.json", "README.md"}) {
    put(folder / "from/" + name, std::string("bytes of ") + name);
  }
  fs::create_symlink("README.md", folder / "from/special_tokens_map.json");
  ModelToSave model = small_model();
  model.source = folder / "from";
  save_model(folder / "to", model);
  EXPECT_EQ(names_in(folder / "to"),
            (std::vector<std::string>{"chat_template.jinja", "config.json",
                                      "generation_config.json", "model.safetensors",
                                      "model.safetensors.index.json", "special_tokens_map.json",
                                      "tokenizer.json", "tokenizer_config.json"}));
  EXPECT_EQ(read_whole(folder / "to/tokenizer.json", "test"), "bytes of tokenizer.json");
  EXPECT_EQ(read_whole(folder / "to/special_tokens_map.json", "test"), "bytes of README.md");
  EXPECT_FALSE(fs::is_symlink(folder / "to/special_tokens_map.json"));
  EXPECT_EQ(ModelFiles(folder / "to").total_bytes(), 80U);
  model.companions = {"*"};  // all but what is written anew
  save_model(folder / "all", model);
  EXPECT_EQ(names_in(folder / "all").size(), 9U);
  EXPECT_EQ(read_model_config(folder / "all").dump(), model.config.dump(-1, true));
  model.source = folder / "none";
  EXPECT_EQ(
      said(folder, [&] { save_model(folder / "new", model); }),
      "model directory: none must be a folder that can be read, got No such file or directory");
  EXPECT_EQ(names_in(folder.path), (std::vector<std::string>{"all", "from", "to"}));
}

TEST(ModelDirectory, SaysWhatToDoWithGguf) {
  const TempFolder folder;
  fs::create_directory(folder / "m");
  put(folder / "m/Q4.GGUF", "GGUF");
  const std::string says =
      "m must be a model's directory, and has no config.json: name the GGUF file itself, m/Q4.GGUF";
  EXPECT_EQ(said(folder, [&] { ModelFiles(folder / "m"); }), says);
  EXPECT_EQ(said(folder, [&] { read_model_config(folder / "m"); }), says);
  put(folder / "m/config.json", "{}");  // a model's folder that has one too
  EXPECT_EQ(said(folder, [&] { read_model_config(folder / "m"); }), "no error");
  fs::create_directory(folder / "b.gguf");
  EXPECT_FALSE(gguf_check(folder / "b.gguf"));
  put(folder / "a.gguf", "GGUF");
  EXPECT_EQ(said(folder, [&] { ModelFiles(folder / "a.gguf"); }),
            "gguf: a.gguf: the version must lie in the file, got 4 bytes where 0 are left");
}

// A link to what never ends, a pipe that nobody writes to, a file of terabytes.
TEST(ModelDirectory, AConfigurationIsASmallFile) {
  const TempFolder folder;
  const std::string config = folder / "config.json";
  fs::create_symlink("/dev/zero", config);
  EXPECT_EQ(said(folder, [&] { read_model_config(folder.path); }),
            "model directory: config.json must be a file, got a device");
  fs::remove(config);
  ASSERT_EQ(mkfifo(config.c_str(), 0600), 0);
  EXPECT_EQ(said(folder, [&] { read_model_config(folder.path); }),
            "model directory: config.json must be a file, got a pipe");
  fs::remove(config);
  put(config, "{}");
  fs::resize_file(config, kMaxJsonFile + 1);
  EXPECT_EQ(said(folder, [&] { read_model_config(folder.path); }),
            "model directory: config.json must have at most 16777216 bytes, got 16777217 or more");
}

// Where the file system exchanges names, as those do that tests run on: others take two renames.
TEST(ModelDirectory, WhileAFolderIsReplacedThereIsOne) {
  const TempFolder folder;
  const ModelToSave model = small_model();
  save_model(folder / "m", model);
  const std::string config = folder / "m/config.json";
  std::atomic<bool> done = false;
  std::int64_t looks = 0, missing = 0;
  std::thread looking([&] {
    for (; !done; ++looks) missing += ::access(config.c_str(), F_OK) != 0 ? 1 : 0;
  });
  for (int i = 0; i < 300; ++i) save_model(folder / "m", model, true);
  done = true;
  looking.join();
  EXPECT_EQ(missing, 0) << "of " << looks;
}

TEST(ModelDirectory, AFolderIsReplacedOnlyWhenAsked) {
  const TempFolder folder;
  ModelToSave model = small_model();
  fs::create_directory(folder / "m");
  save_model(folder / "m", model);  // an empty one is as good as none
  put(folder / "m/vocab.json", "x");
  const ModelFiles old(folder / "m");
  const Tensor in_use = old.tensor("b");
  model.tensors = {{"new", in_use}};
  EXPECT_EQ(said(folder, [&] { save_model(folder / "m", model); }),
            "model directory: m must be empty or absent, got a folder that holds something");
  EXPECT_TRUE(fs::exists(folder / "m/vocab.json"));
  fs::create_directory_symlink("m", folder / "link");
  save_model(folder / "link", model, true);
  EXPECT_TRUE(fs::is_symlink(folder / "link"));
  EXPECT_FALSE(fs::exists(folder / "m/vocab.json"));
  EXPECT_EQ(ModelFiles(folder / "m").names(), (std::vector<std::string>{"new"}));
  EXPECT_EQ(ModelFiles(folder / "m").tensor("new").host<float>()[3], 4);
  EXPECT_EQ(in_use.host<float>()[3], 4);  // its file is gone, its bytes are not
  EXPECT_EQ(folder.files(), 2U);

  fs::create_directory(folder / "work");
  put(folder / "work/thesis", "x");
  EXPECT_EQ(said(folder, [&] { save_model(folder / "work", model, true); }),
            "model directory: work contains thesis, which is not part of a model: only a model's "
            "folder is replaced");
  EXPECT_EQ(said(folder, [&] { save_model(folder / "work/thesis", model, true); }),
            "model directory: work/thesis must be a folder, got a file");
  EXPECT_EQ(said(folder, [&] { save_model(folder / "work/thesis/m", model); }),
            "model directory: work/thesis/m must be writable, got Not a directory");
  EXPECT_EQ(folder.files(), 3U);
  EXPECT_EQ(names_in(folder / "work").size(), 1U);
}

// ---- what may be replaced ----

// Whatever a model's folder may hold, by save_model and by mlx-lm.
void put_model(const fs::path& folder) {
  fs::create_directories(folder);
  for (const char* name : {"model.safetensors", "model-00001-of-00002.safetensors"}) {
    write_safetensors((folder / name).string(), {});
  }
  for (const char* name :
       {"model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "chat_template.jinja", "generation_config.json", "chat_template.json"}) {
    put(folder / name, "x");
  }
  put(folder / "merges.txt", "#version: 0.2\na b\n");
  put(folder / "config.json", R"({"model_type": "qwen3"})");
  put(folder / "README.md", "---\nlibrary_name: mlx\ntags:\n- mlx\n---\n");
}

TEST(ModelDirectory, OnlyAModelsFolderMayBeReplaced) {
  const TempFolder folder;
  const std::string m = folder / "m";
  EXPECT_EQ(replace_fault(m), "");
  fs::create_directory(m);
  EXPECT_EQ(replace_fault(m), "");
  put_model(m);
  EXPECT_EQ(replace_fault(m), "");
  const auto refused = [&](const std::string& name) {
    EXPECT_EQ(replace_fault(m), "contains " + name + ", which is not part of a model");
    fs::remove_all(folder / "m/" + name);
    EXPECT_EQ(replace_fault(m), "");
  };
  for (const char* name : {"notes.txt",
                           "server.js",
                           "train.py",
                           "model_mine.safetensors",
                           "model-best.safetensors",
                           "adapters.safetensors",
                           "state.safetensors",
                           ".gitattributes",
                           ".env.json",
                           "config.json.bak",
                           "tokenizer_notes.txt",
                           "modeling_mine.py",
                           "configuration_mine.py",
                           "tokenization_mine.py",
                           "prompt.jinja",
                           "model-00002-of-00002.safetensors",
                           "tokenizer-mine.json",
                           "tokenizer_comparison.json",
                           "tokenizer_mine.model",
                           "words.tiktoken",
                           "vocab.txt",
                           "merges.txt",
                           "preprocessor_config.json",
                           "Tokenizer.json"}) {
    put(folder / "m/" + name, "mine");
    refused(name);
  }
  for (const char* name : {".git", "adapters", "tokenizer.d.json"}) {
    fs::create_directory(folder / "m/" + name);
    refused(name);
  }
  put(folder / "mine", "mine");
  fs::remove(folder / "m/vocab.json");
  fs::create_symlink("../mine", folder / "m/vocab.json");
  refused("vocab.json");
  put(folder / "m/model.safetensors", "mine");
  EXPECT_EQ(replace_fault(m), "contains model.safetensors, which is not part of a model");
  write_safetensors(folder / "m/model.safetensors", {});

  for (const char* text : {R"({"port": 80})", R"({"model_type": 3})", "[]", "{"}) {
    put(folder / "m/config.json", text);
    EXPECT_EQ(replace_fault(m), "contains config.json, which is not a model's") << text;
  }
  fs::remove(folder / "m/config.json");
  EXPECT_EQ(replace_fault(m), "has no config.json of a model");
}

TEST(ModelDirectory, AModelHasWeights) {
  const TempFolder folder;
  const std::string m = folder / "m";
  put_model(m);
  fs::remove(folder / "m/model.safetensors");
  EXPECT_EQ(replace_fault(m), "");
  fs::remove(folder / "m/model.safetensors.index.json");
  EXPECT_EQ(replace_fault(m), "has no model.safetensors.index.json");
  fs::remove(folder / "m/model-00001-of-00002.safetensors");
  EXPECT_EQ(replace_fault(m), "has no weights of a model");
}

TEST(ModelDirectory, WhatTheSourceHasTooIsReplaced) {
  const TempFolder folder;
  const std::string m = folder / "m", from = folder / "from";
  ModelToSave model = small_model();
  model.config.set("model_type", "new");
  model.source = from;
  fs::create_directory(from.c_str());
  for (const char* name : {"tokenizer_extra.json", "words.tiktoken", "preprocessor_config.json"}) {
    put(from + "/" + name, "theirs");
    save_model(m, model);
    EXPECT_EQ(replace_fault(m), std::string("contains ") + name + ", which is not part of a model");
    save_model(m, model, true);  // the same comes again
    put(m + "/" + name, "mine!!");
    EXPECT_EQ(said(folder, [&] { save_model(m, model, true); }),
              "model directory: m contains " + std::string(name) +
                  ", which is not part of a model: only a model's folder is replaced");
    EXPECT_EQ(read_whole(m + "/" + name, "test"), "mine!!");
    fs::remove(m + "/" + name);
    fs::remove(from + "/" + name);
    fs::remove_all(m);
  }
  save_model(m, model);
  put(m + "/merges.txt", "#version: 0.2\na b\n");
  EXPECT_EQ(replace_fault(m), "");
}

TEST(ModelDirectory, CodeIsReplacedByTheSameAlone) {
  const TempFolder folder;
  const std::string m = folder / "m", from = folder / "from";
  ModelToSave model = small_model();
  model.config.set("model_type", "new");
  model.source = from;
  for (const char* name : {"from/modeling_new.py", "from/prompt.jinja"}) {
    fs::create_directory(from.c_str());
    put(folder / name, "code");
  }
  save_model(m, model);
  EXPECT_EQ(replace_fault(m), "contains modeling_new.py, which is not part of a model");
  EXPECT_EQ(replace_fault(m, from), "");
  save_model(m, model, true);
  EXPECT_EQ(read_whole(folder / "m/modeling_new.py", "test"), "code");
  put(folder / "m/modeling_new.py", "mine");  // as long
  EXPECT_EQ(said(folder, [&] { save_model(m, model, true); }),
            "model directory: m contains modeling_new.py, which is not part of a model: only a "
            "model's folder is replaced");
  EXPECT_EQ(read_whole(folder / "m/modeling_new.py", "test"), "mine");
  // In the source, and yet not in what is to come.
  put(folder / "m/modeling_new.py", "code");
  model.companions = {"*.jinja"};
  EXPECT_NE(said(folder, [&] { save_model(m, model, true); }).find("contains modeling_new.py"),
            std::string::npos);
  EXPECT_EQ(read_whole(folder / "m/modeling_new.py", "test"), "code");
  EXPECT_EQ(names_in(folder.path), (std::vector<std::string>{"from", "m"}));
}

TEST(ModelDirectory, ACardIsReplacedAsMlxLmWritesIt) {
  const TempFolder folder;
  const std::string m = folder / "m", card = folder / "m/README.md";
  put_model(m);
  const std::string front =
      "---\nlicense: mit\nlanguage:\n- en\nlibrary_name: mlx\nbase_model: a/B\ntags:\n- mlx\n---\n";
  const std::string body =
      "\n# mlx-community/B-4bit\n\n"
      "This model [mlx-community/B-4bit](https://huggingface.co/mlx-community/B-4bit) was\n"
      "converted to MLX format from [a/B](https://huggingface.co/a/B)\n"
      "using mlx-lm version **0.26.0**.\n\n## Use with mlx\n\n```bash\npip install "
      "mlx-lm\n```\n\n"
      "```python\nfrom mlx_lm import load, generate\n\nmodel, tokenizer = "
      "load(\"mlx-community/B-4bit\")\n\nprompt = \"hello\"\n\nif tokenizer.chat_template is not "
      "None:\n    messages = [{\"role\": \"user\", \"content\": prompt}]\n    prompt = "
      "tokenizer.apply_chat_template(\n        messages, add_generation_prompt=True\n    )\n\n"
      "response = generate(model, tokenizer, prompt=prompt, verbose=True)\n```\n";
  for (const std::string& text : std::initializer_list<std::string>{
           front, front + body,
           front + "# a/b\nThe Model [a/b](https://huggingface.co/a/b) was converted to MLX format "
                   "from [c/d](https://huggingface.co/c/d) using mlx-lm version **0.16.0**.\r\n"}) {
    put(card, text);
    EXPECT_EQ(replace_fault(m), "") << text;
  }
  for (const std::string& text : std::initializer_list<std::string>{
           "# Mine\n", body, front + "# What I found out\n", front + body + "My notes.\n",
           front + "My notes.\n" + body, front + body + "# My/notes of this\n",
           "---\n# mine\nlibrary_name: mlx\n---\n" + body, "---\nlibrary_name: mlx\n--- mine\n",
           front + "converted to MLX format using mlx-lm version **0.28.0**. Mine\n",
           front + std::string(1000, '[') + "\n"}) {
    put(card, text);
    EXPECT_EQ(replace_fault(m), "contains README.md, which is not part of a model") << text;
  }
}

// A user's file that comes while the new folder is written is found before anything is removed.
TEST(ModelDirectory, WhatComesMeanwhileStays) {
  const TempFolder folder;
  const ModelToSave model = small_model();
  save_model(folder / "m", model);
  put(folder / "m/vocab.json", "old");
  std::atomic<bool> done = false;
  std::atomic<int> put_there = 0, lost = 0;
  std::thread user([&] {  // who leaves a note as soon as there is none
    while (!done) {
      const int file = open((folder / "m/notes.txt").c_str(), O_CREAT | O_EXCL | O_WRONLY, 0644);
      if (file < 0) continue;
      close(file);
      ++put_there;
      usleep(300);
      if (unlink((folder / "m/notes.txt").c_str()) != 0) ++lost;
    }
  });
  int saved = 0;
  for (int i = 0; i < 300; ++i) {
    try {
      save_model(folder / "m", model, true);
      ++saved;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("notes.txt"), std::string::npos) << e.what();
    }
  }
  done = true;
  user.join();
  // A note may be for a moment in the folder that was put aside, but never gone for good.
  EXPECT_GT(put_there, 0);
  std::size_t notes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder.path)) {
    notes += entry.path().filename() == "notes.txt" ? 1 : 0;
  }
  EXPECT_LE(static_cast<std::size_t>(lost), notes);
}

TEST(ModelDirectory, TwoRunsThatMakeOneFolder) {
  const TempFolder folder;
  ModelToSave model = small_model();
  model.tensors = {{"large", floats(1 << 23, 0)}};  // time for the other
  std::thread other([&] {
    while (folder.files() == 0) continue;  // it is being written, aside
    put_model(folder / "m");
  });
  const std::string last = said(folder, [&] { save_model(folder / "m", model); });
  other.join();
  EXPECT_EQ(last, "model directory: m was made by another run meanwhile, and is left as it is");
  EXPECT_EQ(read_whole(folder / "m/vocab.json", "test"), "x");
  EXPECT_EQ(names_in(folder.path), std::vector<std::string>{"m"});
}

// What a process that was killed has left: known by its mark, which nobody holds any more.
TEST(ModelDirectory, WhatAKilledProcessLeftIsTakenAway) {
  const TempFolder folder;
  const std::string text = "mlxtape makes a model here\n";
  const auto names = [&] {
    return names_in(folder.path);
  };
  // Of a name like ours, and without a mark, or with another's.
  put_model(folder / "m.tmp999999.2024");
  put_model(folder / "m.tmp999999.3");
  put(folder / "m.tmp999999.3.lock", "mine\n");
  put_model(folder / "n.tmp999999.4");
  put(folder / "n.tmp999999.4.lock", text);
  put(folder / "m.tmp999999.x.lock", text);
  const std::vector<std::string> others = names();
  // With one that somebody holds.
  put_model(folder / "m.tmp999999.5");
  put(folder / "m.tmp999999.5.lock", text);
  const int held = open((folder / "m.tmp999999.5.lock").c_str(), O_RDONLY);
  ASSERT_EQ(flock(held, LOCK_EX), 0);
  save_model(folder / "m", small_model());
  EXPECT_EQ(names().size(), others.size() + 3);
  close(held);
  put(folder / "m.tmp999999.5/notes.txt", "mine");
  put_model(folder / "m.tmp999999.5.old");
  save_model(folder / "m", small_model(), true);
  fs::remove_all(folder / "m");
  EXPECT_EQ(names_in(folder / "m.tmp999999.5"), std::vector<std::string>{"notes.txt"});
  fs::remove_all(folder / "m.tmp999999.5");
  EXPECT_EQ(names(), others);

  // What was moved aside, between two renames.
  put_model(folder / "m.tmp999999.6.old");
  restore_moved_model(folder / "m");
  EXPECT_FALSE(fs::exists(folder / "m"));
  put(folder / "m.tmp999999.6.lock", text);
  restore_moved_model((folder / "m") + "/");
  EXPECT_EQ(replace_fault(folder / "m"), "");
  EXPECT_FALSE(fs::exists(folder / "m.tmp999999.6.old"));
  put_model(folder / "m.tmp999999.6.old");
  restore_moved_model(folder / "m");  // it is there
  EXPECT_TRUE(fs::exists(folder / "m.tmp999999.6.old"));
  fs::remove_all(folder / "m");
  save_model(folder / "m", small_model());  // the old one stays as long as there is none
  EXPECT_TRUE(fs::exists(folder / "m.tmp999999.6.old"));
  save_model(folder / "m", small_model(), true);
  fs::remove_all(folder / "m");
  EXPECT_EQ(names(), others);

  const pid_t child = fork();
  if (child == 0) {
    ModelToSave large = small_model();
    large.tensors = {{"large", floats(1 << 26, 0)}};
    try {
      for (;;) save_model(folder / "m", large, true);
    } catch (...) {
      _exit(1);
    }
  }
  while (names().size() < others.size() + 2) continue;  // a folder and its mark
  kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_GT(names().size(), others.size());
  save_model(folder / "m", small_model(), fs::exists(folder / "m"));
  fs::remove_all(folder / "m");
  EXPECT_EQ(names(), others);
}

TEST(ModelDirectory, RemovesAModelsFilesAlone) {
  const TempFolder folder;
  put_model(folder / "m");
  put(folder / "m/model.safetensors.tmp12.0", "half");
  put(folder / "m/words.tiktoken.tmp12.0", "half");
  remove_model_files(folder / "m");
  EXPECT_FALSE(fs::exists(folder / "m"));
  put_model(folder / "m");
  put(folder / "m/notes.txt", "mine");
  put(folder / "m/notes.tmp1", "mine");
  fs::create_directory(folder / "m/.git");
  remove_model_files(folder / "m");
  EXPECT_EQ(names_in(folder / "m"), (std::vector<std::string>{".git", "notes.tmp1", "notes.txt"}));
  remove_model_files(folder / "none");
}

TEST(ModelDirectory, AFailedSaveLeavesWhatWasThere) {
  const TempFolder folder;
  ModelToSave model = small_model();
  save_model(folder / "m", model);
  const auto before = read_whole(folder / "m/model.safetensors", "test");
  model.tensors = {{"first", floats(2, 1)}, {"large", floats(5000, 1)}};
  model.shard_bytes = 8;  // the first file can be written, the second cannot
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 1000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string replaced = said(folder, [&] { save_model(folder / "m", model, true); });
  const std::string fresh = said(folder, [&] { save_model(folder / "n", model); });
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, SIG_DFL);
  EXPECT_NE(replaced.find("must be writable, got File too large"), std::string::npos) << replaced;
  EXPECT_NE(fresh.find("must be writable, got File too large"), std::string::npos) << fresh;
  EXPECT_EQ(folder.files(), 1U);
  EXPECT_EQ(read_whole(folder / "m/model.safetensors", "test"), before);

  model = small_model();
  model.tensors.push_back(model.tensors[0]);
  EXPECT_EQ(said(
                folder, [&] { save_model(folder / "n", model); }, Errc::kArgument),
            "model directory: tensor \"b\" must come once");
  model.config = 3;
  EXPECT_EQ(said(
                folder, [&] { save_model(folder / "n", model); }, Errc::kArgument),
            "model directory: the configuration must be an object");
  EXPECT_EQ(folder.files(), 1U);
}

}  // namespace
}  // namespace mlxtape::formats
