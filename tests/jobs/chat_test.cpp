#include "mlxtape/jobs/chat.h"

#include <filesystem>

#include <unistd.h>

#include "mlxtape/base/files.h"
#include "models/small_models.h"
#include "support/op_test.h"

namespace mlxtape::test {
namespace {

namespace fs = std::filesystem;
using formats::Json;
using jobs::Finish;

// A turn stays as it was written.
const char* const kPlain =
    "{% for m in messages %}{{ '<A>' if m.role == 'user' else '<B>' if m.role == 'assistant' else "
    "'<C>' }}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<B>{% endif %}";
// An answer is asked for with words that go with it, and of earlier ones two letters are left.
const char* const kForgets =
    "{% for m in messages %}{{ '<A>' if m.role == 'user' else '<B>' if m.role == 'assistant' else "
    "'<C>' }}{{ m.content[:2] if m.role == 'assistant' else m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<B>(HINK){% endif %}";
// Nothing stays where it was.
const char* const kCounts =
    "{{ messages | length }}:{% for m in messages %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}";

class ChatSessions : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    folder_ = fs::temp_directory_path() / ("mlxtape_chat_test_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
    write_whole((folder_ / "tokenizer.json").string(), small_tokenizer_json(), "test");
  }
  void TearDown() override {
    fs::remove_all(folder_);
    OnDevice::TearDown();
  }
  formats::Tokenizer tokenizer(const std::string& chat_template) {
    write_whole((folder_ / "chat_template.jinja").string(), chat_template, "test");
    return formats::Tokenizer::from_directory(folder_.string());
  }
  // What the model says to these turns when it has never heard any of them.
  std::string anew(const models::Model& model, const formats::Tokenizer& tokenizer, Json messages,
                   const std::string& text, std::int64_t max_tokens) {
    messages.array().push_back(Json::Object{{"role", "user"}, {"content", text}});
    formats::ChatOptions chat;
    chat.add_generation_prompt = true;
    jobs::GenerateOptions options;
    options.max_tokens = max_tokens;
    return jobs::generate(encoder(), model, tokenizer, {tokenizer.encode_chat(messages, chat)},
                          options)
        .sequences[0]
        .text;
  }

 private:
  fs::path folder_;
};

// Whatever the template does to earlier turns, and however little room there is at first: each answer is the one that
// a model without memory gives to all turns.
TEST_P(ChatSessions, AsIfNothingWereKept) {
  for (const std::string& type : model_types()) {
    const models::Model model = small_model(encoder(), type);
    for (const char* chat_template : {kPlain, kForgets, kCounts}) {
      for (const std::int64_t capacity : {1, 4096}) {
        SCOPED_TRACE(type + " " + chat_template + " " + std::to_string(capacity));
        const formats::Tokenizer words = tokenizer(chat_template);
        jobs::ChatSettings options;
        options.system = "BE KIND";
        options.generate.max_tokens = 6;
        options.first_room = capacity;
        jobs::ChatSession chat(encoder(), model, words, options);
        std::int64_t held = 0, asked_at = 0;
        for (const char* text : {"HELLO", "AND", "GOOD", "123"}) {
          const std::string want = anew(model, words, chat.messages(), text, 6);
          const jobs::Reply reply = chat.say(text);
          EXPECT_EQ(reply.answer.text, want);
          EXPECT_EQ(reply.kept + reply.read + 5, chat.tokens());  // the last one said is not read
          // Nothing is read twice that need not be.
          if (chat_template == kPlain) {
            EXPECT_EQ(reply.kept, held);
          }
          if (chat_template == kForgets && held > 0) {
            // Attention keeps "<B>" too, which is written in any case; delta nets end with the question.
            EXPECT_EQ(reply.kept, type == "qwen3" ? asked_at : asked_at - 3);
          }
          held = chat.tokens();
          asked_at = reply.kept + reply.read - 6;  // before "(HINK)"
        }
        EXPECT_EQ(chat.messages().array().size(), 9U);
        chat.reset();
        EXPECT_EQ(chat.messages().array().size(), 1U);
        EXPECT_EQ(chat.say("HELLO").kept, 0);
      }
    }
  }
}

TEST_P(ChatSessions, StoppedAndGoingOn) {
  for (const char* type : {"qwen3", "qwen3_next"}) {
    const models::Model model = small_model(encoder(), type);
    const formats::Tokenizer words = tokenizer(kPlain);
    for (int calls = 0; calls < 6; ++calls) {
      SCOPED_TRACE(std::string(type) + " " + std::to_string(calls));
      jobs::ChatSettings options;
      options.generate.max_tokens = 6;
      options.generate.prefill_chunk = 4;
      bool stop = true;
      int left = calls;
      options.generate.stop = [&] {
        return stop && left-- <= 0;
      };
      jobs::ChatSession chat(encoder(), model, words, options);
      const jobs::Reply cut = chat.say("HELLO");  // two chunks and one, then tokens
      EXPECT_EQ(cut.answer.finish, Finish::kCancelled);
      stop = false;
      const std::string want = anew(model, words, chat.messages(), "AND", 6);
      const jobs::Reply next = chat.say("AND");
      EXPECT_EQ(next.answer.text, want);
      EXPECT_EQ(next.answer.finish, Finish::kLength);
    }
  }
}

TEST_P(ChatSessions, SaysWhatIsWrongAndGoesOn) {
  const models::Model model = small_model(encoder(), "qwen3_next");
  const formats::Tokenizer words = tokenizer(kPlain);
  jobs::ChatSettings options;
  options.generate.max_tokens = 6;
  options.generate.prefill_chunk = 4;  // a turn that fails has been read in part
  options.max_context = 48;
  jobs::ChatSession chat(encoder(), model, words, options);
  const jobs::Reply first = chat.say("HELLO");
  const Json before = chat.messages();
  const std::string much(40, 'A');
  expect_error(Errc::kArgument, "must have 1 to 47 tokens, got", [&] { chat.say(much); });
  expect_error(Errc::kIo, "in the vocabulary of 80, got 97", [&] { chat.say("AAAAAAAAa"); });
  EXPECT_EQ(chat.messages(), before);
  const std::string want = anew(model, words, before, "AND", 6);
  EXPECT_EQ(chat.say("AND").answer.text, want);
  // Up to the last token that there is room for.
  const jobs::Reply last = chat.say("O");
  EXPECT_EQ(last.kept + last.read + static_cast<std::int64_t>(last.answer.tokens.size()), 48);

  const auto bare = formats::Tokenizer::from_json(small_tokenizer_json(), "bare");
  expect_error(Errc::kArgument, "must have a chat template",
               [&] { jobs::ChatSession(encoder(), model, bare, {}); });
  options.generate.max_tokens = 0;
  expect_error(Errc::kArgument, "must be at least 1",
               [&] { jobs::ChatSession(encoder(), model, words, options); });
}

MT_ON_EVERY_BACKEND(ChatSessions);

}  // namespace
}  // namespace mlxtape::test
