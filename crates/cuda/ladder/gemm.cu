// Checks the wgmma GEMM against double precision, then times it on the projections of the 4B model.

#include <string>

#include "hopper_gemm.cu"
#include "common.cuh"

using namespace hopper;
using Kernel = void (*)(GemmArgs);

struct Width {
    int bn, bk, bytes;
    Kernel kernels[3];
};
#define WIDTH(bn) {bn, Gemm<bn>::BK, Gemm<bn>::BYTES, {gemm_store_##bn, gemm_add_##bn, gemm_gate_up_##bn}}
static const Width widths[] = {WIDTH(256), WIDTH(192), WIDTH(160), WIDTH(128), WIDTH(80), WIDTH(64)};

// A matrix in panels, read in boxes of `panels` panels and `width` columns.
static CUtensorMap map(const bf16* p, int rows, int columns, int panels, int width) {
    static auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found;
        CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    }();
    CUtensorMap m;
    cuuint64_t sizes[3] = {256, cuuint64_t(columns) / 32, cuuint64_t(rows + 7) / 8}, strides[2] = {512, cuuint64_t(columns) * 16};
    cuuint32_t box[3] = {256, cuuint32_t(width) / 32, cuuint32_t(panels)}, steps[3] = {1, 1, 1};
    CUresult r = encode(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(p), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                        CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r) std::printf("tensor map: error %d\n", r), std::exit(1);
    return m;
}

static void launch(const Width& w, Epilogue e, const bf16* x, const bf16* weights, void* out, int m, int n, int k) {
    const GemmArgs args{map(x, m, k, BM / 8, w.bk), map(weights, n, k, w.bn / 16, w.bk), out, m, n, k};
    CHECK(cudaFuncSetAttribute(w.kernels[e], cudaFuncAttributeMaxDynamicSharedMemorySize, w.bytes));
    w.kernels[e]<<<132, GEMM_THREADS, w.bytes>>>(args);
    CHECK(cudaGetLastError());
}

static double panel(const std::vector<bf16>& p, int columns, int row, int column) {
    return value(p[(size_t(row / 8) * (columns / 8) + column / 8) * 64 + row % 8 * 8 + column % 8]);
}

static bool check(int m, int n, int k) {
    const int rows = (m + 7) / 8 * 8;
    Buffer<bf16> x(size_t(rows) * k), w(size_t(n) * k), h(size_t(rows) * n / 2);
    Buffer<float> out(size_t(m) * n), before(size_t(m) * n);
    random_bf16(x, 1, 1.0f);
    random_bf16(w, 2, 3.0f / std::sqrt(float(k)));
    fill_f32<<<256, 256>>>(before.p, before.n, 3, 1, 0);
    auto hx = x.host(), hw = w.host();
    auto hb = before.host();
    std::vector<double> want(size_t(m) * n);
    parallel(m, [&](int i) {
        std::vector<double> row(k);
        for (int c = 0; c < k; c++) row[c] = panel(hx, k, i, c);
        for (int j = 0; j < n; j++) {
            double s = 0;
            for (int c = 0; c < k; c++) s += row[c] * panel(hw, k, j, c);
            want[size_t(i) * n + j] = s;
        }
    });
    bool good = true;
    for (const Width& width : widths) {
        CHECK(cudaMemset(out.p, 0xff, out.n * 4));
        launch(width, STORE, x.p, w.p, out.p, m, n, k);
        double store = nmse(out.host(), want);
        out.set(hb);
        launch(width, ADD, x.p, w.p, out.p, m, n, k);
        auto sum = want;
        for (size_t i = 0; i < sum.size(); i++) sum[i] += hb[i];
        double add = nmse(out.host(), sum);
        CHECK(cudaMemset(h.p, 0xff, h.n * 2));
        launch(width, GATE_UP, x.p, w.p, h.p, m, n, k);
        auto hh = h.host();
        std::vector<double> got, silu;
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n / 2; j++) {
                double g = want[size_t(i) * n + 2 * j], u = want[size_t(i) * n + 2 * j + 1];
                silu.push_back(g / (1 + std::exp(-g)) * u);
                got.push_back(panel(hh, n / 2, i, j));
            }
        double gate = nmse(got, silu);
        bool ok = store < 1e-10 && add < 1e-10 && gate < 1e-5;
        good = good && ok;
        std::printf("%d x %d x %d, width %3d: nmse store %.1e, add %.1e, gate-up (bf16) %.1e %s\n", m, n, k, width.bn, store, add, gate, ok ? "" : "WRONG");
    }
    std::fflush(stdout);
    return good;
}

int main(int argc, char**) {
    if (argc == 1 && !(check(333, 656, 320) && check(129, 2560, 1024))) return 1;
    struct Shape {
        const char* name;
        int n, k;
        Epilogue e;
    } shapes[] = {{"qkv", 6144, 2560, STORE}, {"o", 2560, 4096, ADD}, {"gate_up", 19456, 2560, GATE_UP}, {"down", 2560, 9728, ADD}};
    constexpr int MOST = 8192, COPIES = 3;
    Buffer<bf16> x(size_t(MOST) * 9728), w(size_t(COPIES) * 19456 * 2560);
    Buffer<float> out(size_t(MOST) * 19456);
    random_bf16(x, 1, 1.0f);
    random_bf16(w, 2, 0.05f);
    for (int m : {128, 512, 2048, 8192}) {
        double total = 0, work = 0;
        for (auto& s : shapes) {
            double best = 1e30, flop = 2.0 * m * s.n * s.k;
            std::string line;
            for (const Width& width : widths) {
                int copy = 0;
                double us = time_us(3, m > 2048 ? 3 : 12, [&] {
                    launch(width, s.e, x.p, w.p + size_t(copy) * s.n * s.k, out.p, m, s.n, s.k);
                    copy = (copy + 1) % COPIES;
                });
                char b[64];
                std::snprintf(b, sizeof b, "  %d: %.0f", width.bn, flop / us / 1e6);
                line += b;
                best = std::min(best, us);
            }
            std::printf("M %5d %-8s TFLOP/s%s\n", m, s.name, line.c_str());
            total += best, work += flop;
        }
        std::printf("M %5d, the best of each: %.0f TFLOP/s, %.1f us a layer\n", m, work / total / 1e6, total);
        std::fflush(stdout);
    }
}
