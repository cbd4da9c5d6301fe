// Lists of tiles become the table that tile_mask reads.
#include <fmt/format.h>

#include <array>
#include <string>

#include "fovea/mask.hpp"

#include "problem/cache.hpp"
#include "problem/tensor_checks.hpp"

namespace fovea {
namespace {

/// Rows of the table in the order that lists have them: those of a head one behind the other, then those of the next.
class TableRows {
 public:
  explicit TableRows(const TensorView& table) : table_(table) {
    for (int dim = 0; dim < table.rank() - 1; ++dim) num_rows_ *= table.size(dim);
  }

  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t num_columns() const { return table_.size(table_.rank() - 1); }

  void set(std::int64_t row, std::int64_t column, bool is_visible) const {
    std::int64_t at = column * table_.stride(table_.rank() - 1);
    for (int dim = table_.rank() - 2; dim >= 0; --dim) {
      at += row % table_.size(dim) * table_.stride(dim);
      row /= table_.size(dim);
    }
    static_cast<std::uint8_t*>(table_.mutable_data())[at] = is_visible ? 1 : 0;
  }

 private:
  const TensorView& table_;
  std::int64_t num_rows_ = 1;
};

class ListChecks {
 public:
  explicit ListChecks(const TileLists& lists) : lists_(lists) {}

  void check() const {
    const bool is_flag =
        lists_.table.dtype() == Dtype::boolean || lists_.table.dtype() == Dtype::u8;
    if (!lists_.table || lists_.table.rank() < 2 || lists_.table.rank() > 4 || !is_flag) {
      checks_.refuse(
          fmt::format("table is {}; expected bool or u8 [q_tiles, kv_tiles], [heads, "
                      "q_tiles, kv_tiles] or [batch, heads, q_tiles, kv_tiles]",
                      shown(lists_.table)));
    }
    checks_.check_memory({"table", lists_.table, true});
    const TableRows rows(lists_.table);
    check_list("indptr", lists_.indptr, "[rows of the table + 1]");
    check_list("indices", lists_.indices, "[number of visible tiles]");
    if (lists_.indptr.size(0) != rows.num_rows() + 1) {
      checks_.refuse(fmt::format("indptr has {} elements; expected {}, the rows of the table + 1",
                                 lists_.indptr.size(0), rows.num_rows() + 1));
    }
    OverlapCheck overlap;
    overlap.add_input("indptr", lists_.indptr);
    overlap.add_input("indices", lists_.indices);
    overlap.add_output("table", lists_.table);
    overlap.refuse_overlap(checks_);
    check_offsets();
    for (std::int64_t row = 0; row < rows.num_rows(); ++row) check_row(row, rows.num_columns());
  }

 private:
  static std::string shown(const TensorView& view) {
    return view ? to_string(view.spec()) : "missing";
  }

  void check_list(std::string_view name, const TensorView& list, std::string_view shape) const {
    if (!list || list.rank() != 1 || !is_index(list.dtype()))
      checks_.refuse(fmt::format("{} is {}; expected i32 or i64 {}", name, shown(list), shape));
    checks_.check_memory({name, list});
  }

  void check_offsets() const {
    const std::int64_t rows = lists_.indptr.size(0) - 1;
    if (const std::int64_t first = index_at(lists_.indptr, 0); first != 0)
      checks_.refuse(fmt::format("indptr[0] is {}; expected 0", first));
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t begin = index_at(lists_.indptr, row);
      const std::int64_t end = index_at(lists_.indptr, row + 1);
      if (end < begin) {
        checks_.refuse(fmt::format("indptr[{}] is {} behind {}; expected offsets that never fall",
                                   row + 1, end, begin));
      }
    }
    const std::int64_t end = index_at(lists_.indptr, rows);
    if (end != lists_.indices.size(0)) {
      checks_.refuse(fmt::format("indptr ends at {}; expected {}, the elements of indices", end,
                                 lists_.indices.size(0)));
    }
  }

  void check_row(std::int64_t row, std::int64_t num_columns) const {
    std::int64_t before = -1;
    for (std::int64_t i = index_at(lists_.indptr, row); i < index_at(lists_.indptr, row + 1); ++i) {
      const std::int64_t tile = index_at(lists_.indices, i);
      if (tile < 0 || tile >= num_columns) {
        checks_.refuse(
            fmt::format("indices[{}] is {}, in row {}; expected 0 to {}, the last tile "
                        "of keys",
                        i, tile, row, num_columns - 1));
      }
      if (tile <= before) {
        checks_.refuse(
            fmt::format("indices[{}] is {} behind {}, in row {}; expected each tile "
                        "once, in rising order: sort the row, and drop what is twice",
                        i, tile, before, row));
      }
      before = tile;
    }
  }

  const TileLists& lists_;
  const TensorChecks checks_{"tile_table"};
};

}  // namespace

void tile_table(const TileLists& lists) {
  ListChecks(lists).check();
  const TableRows rows(lists.table);
  for (std::int64_t row = 0; row < rows.num_rows(); ++row) {
    for (std::int64_t column = 0; column < rows.num_columns(); ++column)
      rows.set(row, column, false);
    for (std::int64_t i = index_at(lists.indptr, row); i < index_at(lists.indptr, row + 1); ++i)
      rows.set(row, index_at(lists.indices, i), true);
  }
}

}  // namespace fovea
