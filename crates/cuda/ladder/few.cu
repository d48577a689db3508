// Checks the small-batch product against double precision, then times it on the projections of the 4B model.

#include <string>

#include "hopper_few.cu"
#include "common.cuh"

using namespace hopper;
using Kernel = void (*)(FewArgs);

struct Width {
    int tokens, bytes;
    Kernel kernels[3];
};
#define WIDTH(t) {t, Few<t>::BYTES, {few_store_##t, few_add_##t, few_gate_up_##t}}
static const Width widths[] = {WIDTH(8), WIDTH(16), WIDTH(32), WIDTH(64)};

static CUtensorMap map(const bf16* p, int rows, int columns, int panels) {
    static auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }();
    CUtensorMap m;
    cuuint64_t sizes[3] = {256, cuuint64_t(columns) / 32, cuuint64_t(rows + 7) / 8}, strides[2] = {512, cuuint64_t(columns) * 16};
    cuuint32_t box[3] = {256, FEW_K / 32, cuuint32_t(panels)}, steps[3] = {1, 1, 1};
    CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(p), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) std::printf("tensor map: error %d\n", r), std::exit(1);
    return m;
}

static void launch(const Width& w, Epilogue e, int splits, const bf16* x, const bf16* weights, void* out, int m, int n, int k) {
    const FewArgs args{map(x, m, k, w.tokens / 8), map(weights, n, k, FEW_ROWS / 8), out, m, n, k};
    CHECK(cudaFuncSetAttribute(w.kernels[e], cudaFuncAttributeMaxDynamicSharedMemorySize, w.bytes));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(splits, (n + FEW_ROWS - 1) / FEW_ROWS);
    config.blockDim = FEW_THREADS;
    config.dynamicSmemBytes = w.bytes;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(splits), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
    CHECK(cudaLaunchKernelEx(&config, w.kernels[e], args));
}

static double panel(const std::vector<bf16>& p, int columns, int row, int column) {
    return value(p[(size_t(row / 8) * (columns / 8) + column / 8) * 64 + row % 8 * 8 + column % 8]);
}

static bool check(const Width& width, int m, int n, int k, int splits) {
    const int rows = (m + 7) / 8 * 8;
    Buffer<bf16> x(size_t(rows) * k), w(size_t(n) * k), h(size_t(rows) * n / 2);
    Buffer<float> out(size_t(m) * n), before(size_t(m) * n);
    random_bf16(x, 1, 1.0f);
    random_bf16(w, 2, 3.0f / std::sqrt(float(k)));
    fill_f32<<<256, 256>>>(before.p, before.n, 3, 1, 0);
    auto hx = x.host(), hw = w.host();
    auto hb = before.host();
    std::vector<double> want(size_t(m) * n), sum(want.size()), silu, got;
    parallel(n, [&](int j) {
        for (int i = 0; i < m; i++) {
            double s = 0;
            for (int c = 0; c < k; c++) s += panel(hx, k, i, c) * panel(hw, k, j, c);
            want[size_t(i) * n + j] = s;
        }
    });
    for (size_t i = 0; i < sum.size(); i++) sum[i] = want[i] + hb[i];
    CHECK(cudaMemset(out.p, 0xff, out.n * 4));
    launch(width, STORE, splits, x.p, w.p, out.p, m, n, k);
    double store = nmse(out.host(), want);
    out.set(hb);
    launch(width, ADD, splits, x.p, w.p, out.p, m, n, k);
    double add = nmse(out.host(), sum);
    CHECK(cudaMemset(h.p, 0xff, h.n * 2));
    launch(width, GATE_UP, splits, x.p, w.p, h.p, m, n, k);
    auto hh = h.host();
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n / 2; j++) {
            double g = want[size_t(i) * n + 2 * j];
            silu.push_back(g / (1 + std::exp(-g)) * want[size_t(i) * n + 2 * j + 1]);
            got.push_back(panel(hh, n / 2, i, j));
        }
    double gate = nmse(got, silu);
    bool ok = store < 1e-10 && add < 1e-10 && gate < 1e-5;
    std::printf("%d x %d x %d, width %d, %d splits: nmse store %.1e, add %.1e, gate-up (bf16) %.1e %s\n", m, n, k, width.tokens, splits, store, add, gate, ok ? "" : "WRONG");
    return ok;
}

int main() {
    bool good = true;
    for (const Width& w : widths)
        for (int splits : {1, 3, 8}) good &= check(w, w.tokens - 1, 656, 1024, splits);
    if (!good) return 1;
    struct Shape {
        const char* name;
        int n, k;
        Epilogue e;
    } shapes[] = {{"qkv", 6144, 2560, STORE}, {"o", 2560, 4096, ADD}, {"gate_up", 19456, 2560, GATE_UP}, {"down", 2560, 9728, ADD}};
    constexpr int COPIES = 4;
    Buffer<bf16> x(size_t(64) * 9728), w(size_t(COPIES) * 19456 * 2560);
    Buffer<float> out(size_t(64) * 19456);
    random_bf16(x, 1, 1.0f);
    random_bf16(w, 2, 0.05f);
    for (const Width& width : widths) {
        double total = 0, bytes = 0;
        for (auto& s : shapes) {
            double best = 1e30;
            std::string line;
            for (int splits : {1, 2, 3, 4, 5, 6, 8}) {
                int copy = 0;
                double us = time_us(3, 16, [&] {
                    launch(width, s.e, splits, x.p, w.p + size_t(copy) * s.n * s.k, out.p, width.tokens, s.n, s.k);
                    copy = (copy + 1) % COPIES;
                });
                char b[64];
                std::snprintf(b, sizeof b, "  %d: %.2f", splits, 2.0 * s.n * s.k / us / 1e6);
                line += b;
                best = std::min(best, us);
            }
            std::printf("%2d rows, %-8s TB/s of weights by splits%s\n", width.tokens, s.name, line.c_str());
            total += best, bytes += 2.0 * s.n * s.k;
        }
        std::printf("%2d rows, the best of each: %.1f us a layer, %.2f TB/s\n", width.tokens, total, bytes / total / 1e6);
        std::fflush(stdout);
    }
}
