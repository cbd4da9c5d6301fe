#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>

#include "core/check.hpp"
#include "expr/passes.hpp"

namespace fovea::expr {

namespace {

// By address: two loads of one slot name have one digest even when they are bound to different
// tensors.
std::vector<const Node*> distinct_objects(const Node& root) {
  std::vector<const Node*> order;
  std::unordered_set<const Node*> seen{&root};
  std::vector<const Node*> stack{&root};
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    order.push_back(node);
    for (const NodePtr& operand : node->operands) {
      if (seen.insert(operand.get()).second) stack.push_back(operand.get());
    }
  }
  return order;
}

[[noreturn]] void clash(const std::string& name) {
  invalid("formula",
          fmt::format("the name '{}' stands for two different captures; expected one name for each",
                      name));
}

void refuse_clashes(const Node& root) {
  std::unordered_map<std::string, const Node*> first;
  for (const Node* node : distinct_objects(root)) {
    if (node->op != Op::scalar && node->op != Op::load) continue;
    const auto [entry, is_new] = first.emplace(node->name, node);
    if (is_new) continue;
    const Node& other = *entry->second;
    if (other.op != node->op) clash(node->name);
    const bool is_same = node->op == Op::load
                             ? same_binding(*other.tensor, *node->tensor)
                             : same_binding(*other.scalar_binding, *node->scalar_binding);
    if (!is_same) clash(node->name);
  }
}

}  // namespace

bool same_binding(const CapturedTensor& a, const CapturedTensor& b) {
  return a.view.data() == b.view.data() && a.view.spec() == b.view.spec();
}

bool same_binding(const CapturedScalar& a, const CapturedScalar& b) {
  // By bits: NaN is the NaN that it is, and 0 is not -0.
  return a.type == b.type &&
         std::bit_cast<std::uint64_t>(a.value) == std::bit_cast<std::uint64_t>(b.value);
}

Captures collect_captures(const Node& root) {
  refuse_clashes(root);
  Captures captures;
  std::unordered_set<std::string> seen;
  for (const Node* node : topological(root)) {
    if (node->op != Op::scalar && node->op != Op::load) continue;
    if (!seen.insert(node->name).second) continue;
    if (node->op == Op::load) {
      captures.tensors.push_back(*node->tensor);
    } else {
      captures.scalars.push_back(*node->scalar_binding);
    }
  }
  return captures;
}

NodePtr rename_slots(const NodePtr& root,
                     const std::function<std::string(const std::string&)>& renamed) {
  return rewrite(root, [&](const NodePtr& node) -> NodePtr {
    if (node->op != Op::scalar && node->op != Op::load) return nullptr;
    const std::string name = renamed(node->name);
    if (name == node->name) return nullptr;
    return with_name(*node, name);
  });
}

NodePtr bind(const NodePtr& root, const Captures& captures) {
  const auto found = [](const auto& captured, const std::string& name) {
    using Captured = typename std::decay_t<decltype(captured)>::value_type;
    const auto it = std::ranges::find(captured, name, &Captured::name);
    FOVEA_ASSERT(it != captured.end());
    return std::make_shared<const Captured>(*it);
  };
  return rewrite(root, [&](const NodePtr& node) -> NodePtr {
    if (node->op == Op::load) return with_binding(*node, found(captures.tensors, node->name));
    if (node->op == Op::scalar) return with_binding(*node, found(captures.scalars, node->name));
    return nullptr;
  });
}

NodePtr without_axes(const NodePtr& load) {
  const CapturedTensor& tensor = *load->tensor;
  if (tensor.word.empty()) return load;
  return with_binding(
      *load, std::make_shared<const CapturedTensor>(CapturedTensor{tensor.name, tensor.view}));
}

Digest structural_key(const NodePtr& root) {
  std::unordered_map<std::string, std::string> numbered;
  for (const Node* node : topological(*root)) {
    if (node->op != Op::scalar && node->op != Op::load) continue;
    numbered.emplace(node->name, fmt::format("slot_{}", numbered.size()));
  }
  return rename_slots(root, [&](const std::string& name) { return numbered.at(name); })->digest;
}

}  // namespace fovea::expr
