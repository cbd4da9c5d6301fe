// Passes over the expression DAG: verify, simplify, substitute, collect. Each returns a new root;
// nodes never change.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "expr/node.hpp"

namespace fovea::expr {

/// Checks every invariant of node.hpp; throws InternalError naming the pass that ran before and the
/// node that broke.
void verify(const Node& root, std::string_view after_pass);

/// Exact rewrites only (constants, x + 0, x * 1, not not, select of a constant, ...): the value of
/// every evaluation stays the same bit for bit, NaN included (so x * 0 stays for floats).
NodePtr simplify(const NodePtr& root);

/// Rebuilds the DAG bottom-up: `replace` may return a new node for a rebuilt one, or null to keep
/// it.
NodePtr rewrite(const NodePtr& root, const std::function<NodePtr(const NodePtr&)>& replace);

/// As rewrite; `replace` is given the node as it was, too.
NodePtr rewrite_beside(
    const NodePtr& root,
    const std::function<NodePtr(const NodePtr& node, const NodePtr& rebuilt)>& replace);

/// Replaces `score` by another formula.
NodePtr substitute_score(const NodePtr& root, const NodePtr& score);

/// The same formula where keys are counted from another one: kv_idx + by and seqlen_kv + by in their places, but where
/// they stand against each other so that nothing changes, as in causal masks. Exact for positions and scalars up to
/// 2^28: sums of them then do not wrap.
NodePtr shift_keys(const NodePtr& root, const NodePtr& by);

/// Is a mask true for every key before the first, counted as far from a row as keys behind it are? Asked of what no
/// shift changes, for positions up to 2^28: bottom-right causal masks are, windows are not.
bool sees_all_keys_before(const NodePtr& mask);

/// Are these views of the same elements?
bool same_binding(const CapturedTensor& a, const CapturedTensor& b);
bool same_binding(const CapturedScalar& a, const CapturedScalar& b);

/// Gives slots other names: `renamed` maps the old name to the new one, or to itself.
NodePtr rename_slots(const NodePtr& root,
                     const std::function<std::string(const std::string&)>& renamed);

/// The same formula with every slot bound to what `captures` has under its name.
NodePtr bind(const NodePtr& root, const Captures& captures);

/// A load as of a program that is no library word: of the tensor in another call than the word was made for.
NodePtr without_axes(const NodePtr& load);

/// Slots in order of first use; throws InvalidArgument when one name is bound to two different
/// things.
Captures collect_captures(const Node& root);

/// Does the formula read this variable?
bool reads(const Node& root, Variable variable);

/// The structural key: slots numbered in order of first use, so programs that differ in names alone
/// share kernels.
Digest structural_key(const NodePtr& root);

/// Refuses loads that are out of range for every position of a problem of these bounds: throws
/// InvalidArgument naming the load, the index, its range and the extent. `bounds` gives [lo, hi] of
/// each Variable.
void refuse_out_of_range_loads(const NodePtr& root, const struct Box& bounds,
                               std::string_view argument);

}  // namespace fovea::expr
