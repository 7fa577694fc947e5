// Loads a model directory and goes on with a text.
//
//   generate MODEL_DIR "text" [cpu|cuda]
#include <mlxtape/mlxtape.h>

#include <cstdio>
#include <string>

using namespace mlxtape;

int main(int argc, char** argv) try {
  if (argc < 3) return std::fprintf(stderr, "usage: generate MODEL_DIR \"text\" [cpu|cuda]\n"), 2;
  const bool on_gpu = argc > 3 && std::string(argv[3]) == "cuda";
  const auto encoder = Device::find(on_gpu ? Backend::kCuda : Backend::kCpu).make_encoder();

  const auto tokenizer = formats::Tokenizer::from_directory(argv[1]);
  const models::Model model = models::load_model(argv[1], *encoder);

  jobs::GenerateOptions options;
  options.max_tokens = 48;
  options.on_text = [](std::size_t, std::string_view text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  std::printf("%s", argv[2]);
  const auto report =
      jobs::generate(*encoder, model, tokenizer, {tokenizer.encode(argv[2])}, options);
  std::printf("\n%lld + %lld tokens, %.0f tokens/s, %.1f MiB\n",
              static_cast<long long>(report.prompt_tokens), static_cast<long long>(report.tokens),
              static_cast<double>(report.tokens) / report.seconds,
              static_cast<double>(report.peak_bytes) / (1 << 20));
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
