// Checks the prefill attention against double precision on sampled queries, then times it.

#include "hopper_attention.cu"
#include "common.cuh"

using namespace hopper;

struct Problem {
    int heads, tokens, position, row, blocks;
    Buffer<bf16> q, out, cache;
    Buffer<uint32_t> table;
    AttentionArgs args;

    Problem(int heads, int tokens, int position, int row)
        : heads(heads), tokens(tokens), position(position), row(row), blocks((position + tokens + BLOCK - 1) / BLOCK),
          q(size_t((row + tokens + 7) / 8 * 8) * heads * HEAD), out(q.n), cache(size_t(blocks) * KV_HEADS * KV_TILE / 2), table(blocks) {
        random_bf16(q, 1, 3.0f);
        random_bf16(cache, 2, 1.5f);
        std::vector<uint32_t> t(blocks);
        for (int i = 0; i < blocks; i++) t[i] = blocks - 1 - i;
        table.set(t);
        args = {q.p, out.p, cache.p, table.p, row, tokens, position};
        CHECK(cudaFuncSetAttribute(attention_prefill, cudaFuncAttributeMaxDynamicSharedMemorySize, ATTENTION_BYTES));
    }

    void launch() {
        attention_prefill<<<dim3(heads, (tokens + QUERIES - 1) / QUERIES), ATTENTION_THREADS, ATTENTION_BYTES>>>(args);
        CHECK(cudaGetLastError());
    }
};

static bool check(int heads, int tokens, int position, int row) {
    Problem p(heads, tokens, position, row);
    CHECK(cudaMemset(p.out.p, 0xff, p.out.n * 2));
    p.launch();
    CHECK(cudaDeviceSynchronize());
    auto q = p.q.host(), out = p.out.host(), cache = p.cache.host();
    auto table = p.table.host();
    auto at = [&](const std::vector<bf16>& v, int r, int c) {
        return double(value(v[(size_t(r / 8) * (heads * HEAD / 8) + c / 8) * 64 + r % 8 * 8 + c % 8]));
    };
    auto kv = [&](int pos, int h, int v, int d) {
        size_t tile = (size_t(table[pos / BLOCK]) * KV_HEADS + h) * 2 + v;
        return double(value(cache[tile * BLOCK * HEAD + (pos % BLOCK / 8 * 16 + d / 8) * 64 + pos % 8 * 8 + d % 8]));
    };
    const int samples = 24;
    std::vector<double> want(size_t(samples) * heads * HEAD), got(want.size());
    parallel(samples * heads, [&](int i) {
        int token = i / heads * (tokens - 1) / (samples - 1), h = i % heads, k = h / (heads / KV_HEADS), n = position + token + 1;
        std::vector<double> s(n);
        double total = 0;
        for (int j = 0; j < n; j++) {
            double dot = 0;
            for (int d = 0; d < HEAD; d++) dot += at(q, row + token, h * HEAD + d) * kv(j, k, 0, d);
            total += s[j] = std::exp(dot / std::sqrt(128.0) - 20);
        }
        for (int d = 0; d < HEAD; d++) {
            double v = 0;
            for (int j = 0; j < n; j++) v += s[j] / total * kv(j, k, 1, d);
            want[size_t(i) * HEAD + d] = v;
            got[size_t(i) * HEAD + d] = at(out, row + token, h * HEAD + d);
        }
    });
    double error = nmse(got, want);
    std::printf("attention, %d heads, %d tokens at %d, row %d: nmse %.1e %s\n", heads, tokens, position, row, error, error < 1e-5 ? "" : "WRONG");
    return error < 1e-5;
}

int main() {
    bool good = check(32, 300, 77, 5);
    good &= check(16, 129, 0, 0);
    good &= check(32, 64, 1000, 3);
    if (!good) return 1;
    for (int tokens : {512, 2048, 12800})
        for (int heads : {16, 32}) {
            Problem p(heads, tokens, 0, 0);
            double us = time_us(3, tokens > 4096 ? 2 : 10, [&] { p.launch(); }), flop = 2.0 * HEAD * heads * tokens * (tokens + 1.0);
            std::printf("attention, %d heads, %5d tokens: %.1f us, %.0f TFLOP/s\n", heads, tokens, us, flop / us / 1e6);
        }
}
