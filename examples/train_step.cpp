// Training steps by hand: a small Qwen3-Next that reads bytes learns one sentence, and is saved as an MLX directory.
//
//   train_step CONFIG_DIR OUTPUT_DIR [cpu|cuda]
#include <mlxtape/mlxtape.h>

#include <cstdio>
#include <string>

using namespace mlxtape;

int main(int argc, char** argv) try {
  if (argc < 3)
    return std::fprintf(stderr, "usage: train_step CONFIG_DIR OUTPUT_DIR [cpu|cuda]\n"), 2;
  const std::string source = argv[1];
  const bool on_gpu = argc > 3 && std::string(argv[3]) == "cuda";
  const auto encoder = Device::find(on_gpu ? Backend::kCuda : Backend::kCpu).make_encoder();

  const auto config =
      models::Config::parse(formats::read_model_config(source), source + "/config.json");
  const models::Model model = models::random_model(config, *encoder, DType::kF32, 42);
  const auto tokenizer = formats::Tokenizer::from_directory(source);
  const auto ids =
      tokenizer.encode("The river bends twice before the mill, then runs straight to the sea.");
  const auto length = static_cast<std::int64_t>(ids.size()) - 1;
  const Tensor tokens = encoder->empty({1, length}, DType::kI32),
               targets = encoder->empty_like(tokens);
  encoder->upload(ids.data(), tokens.bytes(), tokens);
  encoder->upload(ids.data() + 1, targets.bytes(), targets);  // each token's next one

  std::vector<ops::AdamWSlot> slots;  // the weights themselves, with their first and second moments
  for (const auto& parameter : models::parameters(model)) {
    const Shape& shape = parameter.tensor.shape();
    slots.push_back({parameter.tensor,
                     {},
                     encoder->zeros(shape, DType::kF32),
                     encoder->zeros(shape, DType::kF32)});
  }
  const ops::StepNumbers numbers{encoder->full({}, DType::kF32, 2e-3),
                                 encoder->zeros({}, DType::kI32)};
  for (int step = 0; step <= 120; ++step) {
    Tape tape(*encoder);
    const models::Model watched = models::watch(tape, model);
    const Tensor loss = models::loss(tape, watched, tokens, targets);
    tape.backward(loss);
    const auto parameters = models::parameters(watched);
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i].grad = tape.grad(parameters[i].tensor);
    ops::advance(*encoder, numbers.t);
    ops::adamw_step(*encoder, slots, numbers);
    float value = 0;
    encoder->download(loss, &value, sizeof value);
    if (step % 20 == 0) std::printf("step %3d  loss %.4f\n", step, static_cast<double>(value));
  }
  models::SaveOptions options;
  options.files_from = source;
  options.replace = true;
  models::save_model(model, argv[2], options);
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
