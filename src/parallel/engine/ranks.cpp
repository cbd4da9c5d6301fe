#include "parallel/engine/ranks.hpp"

#include <array>
#include <utility>

#include "core/check.hpp"
#include "core/shape.hpp"

namespace fovea::parallel {

std::vector<std::int64_t> shape_with_tokens(const TensorView& like, std::int64_t num_tokens) {
  const auto shape = shape_of(like);
  std::vector<std::int64_t> result(shape.begin(), shape.end());
  result[0] = num_tokens;
  return result;
}

Pending& Pending::operator=(Pending&& other) noexcept {
  std::swap(communicator_, other.communicator_);
  std::swap(stream_, other.stream_);
  std::swap(exchange_, other.exchange_);
  std::swap(received_, other.received_);
  std::swap(sent_, other.sent_);
  return *this;
}

Pending::~Pending() {
  if (communicator_ == nullptr) return;
  try {
    communicator_->wait(exchange_, stream_);
  } catch (const Error&) {  // another is on its way already
  }
}

std::vector<OwnedTensor> Pending::wait() {
  if (communicator_ != nullptr) std::exchange(communicator_, nullptr)->wait(exchange_, stream_);
  sent_.clear();
  return std::move(received_);
}

Pending Ranks::gather(const OwnedTensor& own) const {
  Pending pending;
  pending.sent_.push_back(memory_.row_major(own));
  const TensorView& sent = pending.sent_.front().view;
  pending.received_.push_back(
      memory_.make(sent.dtype(), shape_with_tokens(sent, sent.size(0) * size())));
  pending.communicator_ = &communicator_;
  pending.stream_ = memory_.stream();
  pending.exchange_ =
      communicator_.begin_all_gather(sent.data(), pending.received_.front().view.mutable_data(),
                                     num_bytes(sent), memory_.stream());
  return pending;
}

Pending Ranks::swap(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) const {
  Pending pending;
  std::vector<OutgoingMessage> sent;
  for (const Outgoing& part : outgoing) {
    FOVEA_ASSERT(part.to != rank());
    pending.sent_.push_back(memory_.row_major(part.tensor));
    const TensorView& lying = pending.sent_.back().view;
    if (num_bytes(lying) != 0)
      sent.push_back({.to = part.to, .data = lying.data(), .bytes = num_bytes(lying)});
  }
  std::vector<IncomingMessage> received;
  for (const Incoming& part : incoming) {
    pending.received_.push_back(part.tensor);
    const TensorView& to = part.tensor.view;
    if (num_bytes(to) != 0)
      received.push_back({.from = part.from, .data = to.mutable_data(), .bytes = num_bytes(to)});
  }
  pending.communicator_ = &communicator_;
  pending.stream_ = memory_.stream();
  pending.exchange_ = communicator_.begin_messages(sent, received, memory_.stream());
  return pending;
}

Pending Ranks::reduce_scatter(const OwnedTensor& parts) const {
  FOVEA_ASSERT(parts.view.dtype() == Dtype::f32);
  Pending pending;
  pending.sent_.push_back(parts);
  pending.received_.push_back(
      memory_.make(Dtype::f32, shape_with_tokens(parts.view, parts.view.size(0) / size())));
  const TensorView& made = pending.received_.front().view;
  pending.communicator_ = &communicator_;
  pending.stream_ = memory_.stream();
  pending.exchange_ = communicator_.begin_reduce_scatter(
      static_cast<const float*>(parts.view.data()), static_cast<float*>(made.mutable_data()),
      static_cast<std::size_t>(made.spec().num_elements()), memory_.stream());
  return pending;
}

}  // namespace fovea::parallel
