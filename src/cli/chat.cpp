// chat: turns of a user and a model, a line at a time.
#include <CLI/CLI.hpp>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <memory>
#include <optional>

#include <unistd.h>

#include "command.h"
#include "interrupt.h"
#include "mlxtape/jobs/chat.h"
#include "model_flags.h"
#include "output.h"

namespace mlxtape::cli {

namespace {

using formats::Json;

struct Flags {
  std::string model, adapters;
  std::int64_t context = 0;
  bool verbose = false;
  AnswerFlags answer;
  TemplateFlags chat;
};

const char* const kHelp =
    "/reset  start a new chat\n"
    "/help   show this text\n"
    "/exit   quit; so does end of input (Ctrl-D)\n"
    "Ctrl-C stops an answer.";

constexpr std::size_t kMostOfLine = std::size_t{64} << 20U;

// Lines of stdin; nothing at its end and on SIGTERM.
class Lines {
 public:
  std::optional<std::string> next() {
    for (;;) {
      if (terminal_) {
        print(">> ");
        std::fflush(stdout);
      }
      errno = 0;
      std::string text;
      if (read(text)) {
        while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
        return text;
      }
      if (errno != EINTR || Interrupts::signal() != SIGINT) break;
      // Ctrl-C while nothing is answered.
      std::clearerr(stdin);
      Interrupts::forget();
      remark("\nuse /exit to quit");
    }
    if (terminal_) print("\n");
    return std::nullopt;
  }

 private:
  // A line with its end, or what is there before the input ends; false: nothing is.
  static bool read(std::string& text) {
    for (int c = 0; (c = ::getc_unlocked(stdin)) != EOF;) {
      if (text.size() == kMostOfLine) {
        throw Error(Errc::kIo, "stdin: a line must have at most " + std::to_string(kMostOfLine) +
                                   " bytes, got more");
      }
      text.push_back(static_cast<char>(c));
      if (c == '\n') return true;
    }
    return !text.empty();
  }

  bool terminal_ = ::isatty(STDIN_FILENO) != 0 && ::isatty(STDOUT_FILENO) != 0;
};

struct Totals {
  std::int64_t turns = 0, kept = 0, read = 0, said = 0;
  double read_seconds = 0, seconds = 0;
  std::size_t peak = 0;

  void add(const jobs::Reply& reply) {
    ++turns;
    kept += reply.kept;
    read += reply.read;
    read_seconds += reply.read_seconds;
    said += static_cast<std::int64_t>(reply.answer.tokens.size());
    seconds += reply.seconds;
    peak = std::max(peak, reply.peak_bytes);
  }
  void tell() const {
    remark("prompt:      " + rate(read, read_seconds) + " (" + std::to_string(kept) + " cached)");
    remark("generation:  " + rate(said, seconds));
  }
};

void show(const jobs::Reply& reply, const Globals& globals, const Flags& flags) {
  if (globals.json) {
    print(Json(Json::Object{{"answer", reply.answer.text},
                            {"finish", name_of(reply.answer.finish)},
                            {"tokens", static_cast<std::int64_t>(reply.answer.tokens.size())},
                            {"prompt_tokens_kept", reply.kept},
                            {"prompt_tokens_read", reply.read}})
              .dump() +
          "\n");
  } else {
    print("\n");
  }
  std::fflush(stdout);
  if (flags.verbose && !globals.quiet) {
    Totals turn;
    turn.add(reply);
    turn.tell();
  }
}

// What to do with a line that begins with a slash; false: leave.
bool obey(const std::string& command, jobs::ChatSession& session) {
  if (command == "/exit") return false;
  if (command == "/reset") {
    session.reset();
    remark("new chat");
  } else {
    remark(command == "/help" ? kHelp
                              : "unknown command: " + command + "; /help lists the commands");
  }
  return true;
}

void run(jobs::ChatSession& session, AnswerWatch& watch, Device& device, const Globals& globals,
         const Flags& flags) {
  Totals totals;
  const Interrupts interrupts("");
  Lines lines;
  while (const std::optional<std::string> line = lines.next()) {
    if (line->empty()) continue;
    if (line->front() == '/') {
      if (!obey(*line, session)) break;
      continue;
    }
    jobs::Reply reply;
    try {
      reply = session.say(*line);
    } catch (const Error& e) {
      watch.end();
      if (::isatty(STDIN_FILENO) == 0) throw;
      remark(std::string("mlxtape: ") +
             e.what());  // the session is as it was, and somebody is there
      continue;
    }
    totals.add(reply);
    show(reply, globals, flags);
    watch.end();
    if (std::ferror(stdout) != 0) return;  // nobody listens; the program ends with an error
    if (Interrupts::signal() == SIGINT) Interrupts::forget();
    if (Interrupts::asked()) break;
  }
  if (totals.turns > 0 && !globals.quiet) {
    totals.tell();
    remark("peak memory: " + human_bytes(static_cast<double>(peak_memory(device, totals.peak))));
  }
  if (Interrupts::asked()) throw Exit{kInterrupted};
}

void chat(const Globals& globals, const Flags& flags) {
  const Json variables = flags.chat.variables();
  expect_model(flags.model);
  const auto tokenizer = formats::Tokenizer::from_directory(flags.model);
  if (tokenizer.chat_template() == nullptr) {
    throw Error(Errc::kIo, flags.model +
                               ": has no chat template; use mlxtape generate, which does not "
                               "need one");
  }
  jobs::ChatSettings options;
  options.generate = flags.answer.for_tokenizer(tokenizer);
  options.generate.stop = [] {
    return Interrupts::asked();
  };
  options.generate.on_text = [&globals](std::size_t, std::string_view text) {
    if (globals.json) return true;
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  options.system = flags.chat.system;
  options.variables = variables;
  options.max_context = flags.context;
  Device& device = globals.device();
  const auto encoder = device.make_encoder();
  const models::Model model = load_model(flags.model, flags.adapters, *encoder, globals);
  AnswerWatch watch(globals);
  watch.attach(options.generate);
  jobs::ChatSession session(*encoder, model, tokenizer, options);
  if (!globals.quiet && ::isatty(STDIN_FILENO) != 0) remark(kHelp);
  run(session, watch, device, globals, flags);
}

}  // namespace

void add_chat(CLI::App& app, const Globals& globals) {
  CLI::App* command = add_command(
      app, "chat",
      "chat interactively, one line at a time; each turn processes only the new tokens.",
      "Examples:\n"
      "  mlxtape chat --model my-model --temp 0.7\n"
      "  printf 'Hello\\nAnd in French?\\n' | mlxtape chat --model my-model --json");
  command->group("Models");
  const auto flags = std::make_shared<Flags>();
  flags->answer.options.max_tokens = 256;
  add_model_flag(*command, flags->model);
  add_adapter_flag(*command, flags->adapters);
  command
      ->add_option(
          "--max-context", flags->context,
          "maximum number of tokens in the whole chat; 0: the model's maximum context length")
      ->check(whole_number(0, std::uint64_t{1} << 31U))
      ->type_name("N")
      ->group("Model");
  flags->chat.add_to(*command);
  flags->answer.add_to(*command);
  command->add_flag("--verbose", flags->verbose, "print speed after each turn, on stderr")
      ->group("Output");
  add_hidden_names(*command, "--max-context", "-c,--ctx-size");
  command->callback([&globals, flags] { chat(globals, *flags); });
}

}  // namespace mlxtape::cli
