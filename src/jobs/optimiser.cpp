#include "mlxtape/jobs/optimiser.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "digits.h"
#include "mlxtape/ops/elementwise.h"

namespace mlxtape::jobs {

namespace {

Error wrong(const std::string& what) { return {Errc::kArgument, "optimiser: " + what}; }

// ---- settings: each is named here and nowhere else ----

template <class Visit>
void each(Adam& o, const Visit& visit) {
  visit("beta1", o.options.beta1);
  visit("beta2", o.options.beta2);
  visit("eps", o.options.eps);
  visit("bias_correction", o.options.bias_correction);
}
template <class Visit>
void each(AdamW& o, const Visit& visit) {
  visit("beta1", o.options.beta1);
  visit("beta2", o.options.beta2);
  visit("eps", o.options.eps);
  visit("weight_decay", o.options.weight_decay);
  visit("bias_correction", o.options.bias_correction);
}
template <class Visit>
void each(Sgd& o, const Visit& visit) {
  visit("momentum", o.options.momentum);
  visit("weight_decay", o.options.weight_decay);
  visit("dampening", o.options.dampening);
  visit("nesterov", o.options.nesterov);
}
template <class Visit>
void each(Lion& o, const Visit& visit) {
  visit("beta1", o.options.beta1);
  visit("beta2", o.options.beta2);
  visit("weight_decay", o.options.weight_decay);
}
template <class Visit>
void each(Muon& o, const Visit& visit) {
  visit("momentum", o.options.momentum);
  visit("weight_decay", o.options.weight_decay);
  visit("nesterov", o.options.nesterov);
  visit("ns_steps", o.options.ns_steps);
  visit("adamw_share", o.adamw_share);
  visit("beta1", o.adamw.beta1);
  visit("beta2", o.adamw.beta2);
  visit("eps", o.adamw.eps);
}

template <class T>
Settings text_of(T of) {
  Settings settings{{"optimizer", of.name()}};
  each(of, [&](const char* name, auto& value) {
    using Value = std::remove_reference_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, bool>) {
      settings[name] = value ? "on" : "off";
    } else if constexpr (std::is_integral_v<Value>) {
      settings[name] = std::to_string(value);
    } else {
      settings[name] = digits(static_cast<double>(value));
    }
  });
  return settings;
}

template <class Value>
void set(const std::string& setting, double number, Value& value) {
  if constexpr (std::is_integral_v<Value>) {  // a switch, or a count
    const double most = std::is_same_v<Value, bool> ? 1 : 1 << 30;
    if (number != std::floor(number) || !(number >= 0 && number <= most)) {
      throw wrong(
          setting +
          (most == 1 ? " must be 1 for on or 0 for off, got " : " must be a whole number, got ") +
          digits(number));
    }
  }
  value = static_cast<Value>(number);
}

template <class T>
std::vector<OptimiserSetting> settings_of(const OptimiserNumbers& usual) {
  std::vector<OptimiserSetting> settings;
  T made;
  each(made, [&](const char* name, auto& value) {
    const auto other = usual.find(name);
    settings.push_back({name, other == usual.end() ? static_cast<double>(value) : other->second,
                        std::is_same_v<std::remove_reference_t<decltype(value)>, bool>});
  });
  return settings;
}

template <class T>
OptimiserPtr made(const OptimiserNumbers& given, const OptimiserNumbers& usual) {
  auto result = std::make_shared<T>();
  OptimiserNumbers left = given;
  std::string has;
  each(*result, [&](const char* name, auto& value) {
    has += (has.empty() ? "" : ", ") + std::string(name);
    const auto other = usual.find(name);
    if (other != usual.end()) set(name, other->second, value);
    const auto found = left.find(name);
    if (found == left.end()) return;
    set(name, found->second, value);
    left.erase(found);
  });
  if (!left.empty()) {
    throw wrong(result->name() + " has no setting " + left.begin()->first + "; it has " + has);
  }
  require(result->check());
  return result;
}

struct Entry {
  const char* name;
  std::vector<OptimiserSetting> (*settings)(const OptimiserNumbers&);
  OptimiserPtr (*make)(const OptimiserNumbers&, const OptimiserNumbers&);
};
constexpr std::array<Entry, 5> kAll = {{{"adamw", settings_of<AdamW>, made<AdamW>},
                                        {"adam", settings_of<Adam>, made<Adam>},
                                        {"sgd", settings_of<Sgd>, made<Sgd>},
                                        {"muon", settings_of<Muon>, made<Muon>},
                                        {"lion", settings_of<Lion>, made<Lion>}}};

const Entry& entry_of(const std::string& name) {
  std::string names;
  for (const Entry& entry : kAll) {
    if (name == entry.name) return entry;
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw wrong("the name must be one of " + names + ", got " + name);
}

// ---- slots as the ops take them ----

ops::AdamWSlot adamw_slot(const OptimiserSlot& s) {
  return {s.w, s.grad, s.states[0], s.states[1], s.master, s.ids};
}
std::vector<std::string> adamw_states() { return {"adamw.m", "adamw.v"}; }

bool is_muons(const Trainable& of) { return of.is_matrix && of.tensor.rank() >= 2; }

}  // namespace

Settings AdamW::settings() const { return text_of(AdamW(options)); }
Check AdamW::check() const { return ops::adamw_step_check({}, {}, options); }
std::vector<std::string> AdamW::states(const Trainable& /*of*/) const { return adamw_states(); }
void AdamW::step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                 const ops::StepNumbers& numbers) const {
  std::vector<ops::AdamWSlot> all;
  all.reserve(slots.size());
  for (const OptimiserSlot& s : slots) all.push_back(adamw_slot(s));
  ops::adamw_step(encoder, all, numbers, options);
}

Settings Sgd::settings() const { return text_of(*this); }
Check Sgd::check() const { return ops::sgd_step_check({}, {}, options); }
std::vector<std::string> Sgd::states(const Trainable& /*of*/) const {
  if (options.momentum == 0) return {};
  return {"sgd.v"};
}
void Sgd::step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
               const ops::StepNumbers& numbers) const {
  std::vector<ops::SgdSlot> all;
  all.reserve(slots.size());
  for (const OptimiserSlot& s : slots) {
    all.push_back({s.w, s.grad, s.states.empty() ? Tensor() : s.states[0], s.master, s.ids});
  }
  ops::sgd_step(encoder, all, numbers, options);
}

Settings Lion::settings() const { return text_of(*this); }
Check Lion::check() const { return ops::lion_step_check({}, {}, options); }
std::vector<std::string> Lion::states(const Trainable& /*of*/) const { return {"lion.m"}; }
void Lion::step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                const ops::StepNumbers& numbers) const {
  std::vector<ops::LionSlot> all;
  all.reserve(slots.size());
  for (const OptimiserSlot& s : slots) all.push_back({s.w, s.grad, s.states[0], s.master, s.ids});
  ops::lion_step(encoder, all, numbers, options);
}

Settings Muon::settings() const { return text_of(*this); }
Check Muon::check() const {
  if (!(adamw_share >= 0) || !std::isfinite(adamw_share)) {
    return wrong("adamw_share must be at least 0 and finite, got " + digits(adamw_share));
  }
  if (const Check check = ops::adamw_step_check({}, {}, adamw)) return check;
  return ops::muon_step_check({}, {}, options);
}
std::vector<std::string> Muon::states(const Trainable& of) const {
  if (is_muons(of)) return {"muon.v"};
  return adamw_states();
}
bool Muon::takes_rows(const Trainable& of) const { return !is_muons(of); }
void Muon::step(CommandEncoder& encoder, const std::vector<OptimiserSlot>& slots,
                const ops::StepNumbers& numbers) const {
  std::vector<ops::MuonSlot> matrices;
  std::vector<ops::AdamWSlot> others;
  for (const OptimiserSlot& s : slots) {
    if (is_muons(s.of)) {
      matrices.push_back({s.w, s.grad, s.states[0], s.master});
    } else {
      others.push_back(adamw_slot(s));
    }
  }
  ops::muon_step(encoder, matrices, numbers, options);
  if (others.empty()) return;
  ops::AdamWOptions how = adamw;
  how.weight_decay = options.weight_decay;
  const Tensor lr = ops::multiply(encoder, numbers.lr, adamw_share);
  ops::adamw_step(encoder, others, {lr, numbers.t, numbers.scale}, how);
}

std::vector<std::string> optimiser_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kAll) names.emplace_back(entry.name);
  return names;
}

std::vector<OptimiserSetting> optimiser_settings(const std::string& name,
                                                 const OptimiserNumbers& usual) {
  return entry_of(name).settings(usual);
}

OptimiserPtr make_optimiser(const std::string& name, const OptimiserNumbers& given,
                            const OptimiserNumbers& usual) {
  return entry_of(name).make(given, usual);
}

std::vector<OptimiserSlot> make_slots(CommandEncoder& encoder, const Optimiser& optimiser,
                                      const std::vector<Trainable>& trainables) {
  std::vector<OptimiserSlot> slots;
  for (const Trainable& each : trainables) {
    OptimiserSlot slot{each, each.tensor.detach(), {}, {}};
    const Shape& shape = slot.w.shape();
    if (slot.w.dtype() != DType::kF32) {
      slot.master = encoder.zeros(shape, DType::kF32);
      encoder.add_into(slot.master, slot.w);
    }
    for (std::size_t i = 0; i < optimiser.states(each).size(); ++i) {
      slot.states.push_back(encoder.zeros(shape, DType::kF32));
    }
    slots.push_back(std::move(slot));
  }
  return slots;
}

}  // namespace mlxtape::jobs
