// A weight as the CPU's products read it: panels of 16 rows (kernels.h says how each format lies).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "backends/cpu/kernels.h"
#include "core/thread_pool.h"
#include "pocket/device.h"

namespace pocket {

class CpuMatrix final : public Matrix {
public:
    // Neighbouring rows of one stored type.
    struct Segment {
        DType dtype;
        std::int64_t first_row, rows;
        std::int64_t num_panels;
        std::size_t panel_bytes;
        std::unique_ptr<Buffer> data;

        const std::byte* panel(std::int64_t index) const noexcept {
            return static_cast<const std::byte*>(data->data()) + static_cast<std::size_t>(index) * panel_bytes;
        }
    };

    // As Device::load_matrix.
    static std::unique_ptr<CpuMatrix> load(std::span<const MatrixPart> parts, DType dtype, ThreadPool& pool);

    std::size_t num_bytes() const noexcept override;
    std::int64_t padded_columns() const noexcept { return (columns() + kColumnStep - 1) / kColumnStep * kColumnStep; }
    const std::vector<Segment>& segments() const noexcept { return segments_; }

    void read_row(std::int64_t row, float* out) const;  // out [columns] float32

private:
    CpuMatrix(std::int64_t rows, std::int64_t columns, DType dtype) : Matrix(rows, columns, dtype) {}
    void fill_panel(Segment& segment, std::int64_t panel, std::span<const MatrixPart> parts) const;

    std::vector<Segment> segments_;
};

}  // namespace pocket
