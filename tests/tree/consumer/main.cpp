// A user's program: one op, on the CPU, and a text, from an installed library.
#include <mlxtape/mlxtape.h>

#include <cstdio>

int main() {
  float logits[] = {1, 1, 1, 1};
  const auto encoder = mlxtape::Device::cpu().make_encoder();
  const auto y = mlxtape::ops::softmax(*encoder, mlxtape::Tensor::wrap(logits, {1, 4}));
  encoder->commit_and_wait();
  std::printf("softmax: %g\n", y.host<float>()[0]);
  try {  // links with all that a tokenizer needs
    mlxtape::formats::Tokenizer::from_json("{}", "nothing");
  } catch (const mlxtape::Error& e) {
    std::printf("%s\n", e.what());
  }
  return y.host<float>()[0] == 0.25F ? 0 : 1;
}
