// Registers the CUDA kernel of advance_rows: checks, Params, launch. Schema and CPU reference: pyllm/ops/rows.py.
#include "common/bind.h"
#include "fused/advance_rows.h"

namespace pyllm {
namespace {

constexpr int64_t kMaxPage = int64_t{1} << 20;

int32_t* check_vector(Check& check, const Tensor& t, const char* name) {
  check(t, name).shape({"S"}).dtype({ScalarType::Int}).contiguous();
  return static_cast<int32_t*>(t.data_ptr());
}

void advance_rows_cuda(const Tensor& sampled, const Tensor& token, const Tensor& position, const Tensor& kv_len, const Tensor& slots,
                       const Tensor& active, const Tensor& table, int64_t page) {
  Check check("advance_rows");
  AdvanceRowsParams p{};
  p.sampled = check_vector(check, sampled, "sampled");
  p.token = check_vector(check, token, "token");
  p.position = check_vector(check, position, "position");
  p.kv_len = check_vector(check, kv_len, "kv_len");
  p.slots = check_vector(check, slots, "slots");
  p.active = check_vector(check, active, "active");
  check(table, "table").shape({"S", "W"}).dtype({ScalarType::Int}).rows();
  const int64_t rows = check["S"], width = check["W"];
  check.require(width >= 1 && width < int64_t{1} << 31, "table", ".size(1) is ", width, ", expected 1 to 2^31 - 1");
  check.require(rows < int64_t{1} << 31, "sampled", ".size(0) is ", rows, ", expected less than 2^31");
  check.require(page >= 1 && page <= kMaxPage, "page", "is ", page, ", expected 1 to ", kMaxPage);
  if (rows == 0) return;
  p.table = static_cast<const int32_t*>(table.data_ptr());
  p.table_stride = table.stride(0);
  p.n = static_cast<int>(rows);
  p.width = static_cast<int>(width);
  p.page = static_cast<int>(page);
  const DeviceScope device(check);
  advance_rows(p, stream_of(check));
}

}  // namespace
}  // namespace pyllm

STABLE_TORCH_LIBRARY_IMPL(pyllm, CUDA, m) { m.impl("advance_rows", PYLLM_BOX(pyllm::advance_rows_cuda)); }
