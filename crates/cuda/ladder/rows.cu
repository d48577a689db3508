// Checks embedding rows, RMSNorm and the placing of heads against double precision, then times the latter two.

#include "hopper_rows.cu"
#include "common.cuh"

using namespace hopper;

static double panel(const std::vector<bf16>& p, int columns, int row, int column) {
    return value(p[(size_t(row / 8) * (columns / 8) + column / 8) * 64 + row % 8 * 8 + column % 8]);
}

static bool check(int rows, int hidden, int heads) {
    const int vocab = 400, width = (heads + 2 * KV_HEADS) * HEAD, blocks = rows / BLOCK + 2;
    Buffer<bf16> embedding(size_t(vocab) * hidden), out(size_t((rows + 7) / 8 * 8) * hidden), q(size_t((rows + 7) / 8 * 8) * heads * HEAD),
        cache(size_t(blocks) * KV_HEADS * KV_TILE / 2);
    Buffer<float> x(size_t(rows) * hidden), weight(hidden), qkv(size_t(rows) * width), norms(2 * HEAD);
    Buffer<float2> rope(size_t(4096) * 64);
    Buffer<uint32_t> tokens(rows), index(rows), positions(rows), slots(rows);
    random_bf16(embedding, 1, 1);
    fill_f32<<<64, 256>>>(weight.p, weight.n, 2, 0.5f, 1);
    fill_f32<<<256, 256>>>(qkv.p, qkv.n, 3, 2, 0);
    fill_f32<<<1, 256>>>(norms.p, norms.n, 4, 0.5f, 1);
    std::vector<uint32_t> t(rows), ix(rows), pos(rows), slot(rows);
    for (int i = 0; i < rows; i++) t[i] = i * 31 % vocab, ix[i] = rows - 1 - i, pos[i] = i * 13 % 4096, slot[i] = (i + 5) * 7 % (blocks * BLOCK);
    tokens.set(t), index.set(ix), positions.set(pos), slots.set(slot);
    std::vector<float2> r(rope.n);
    for (int p = 0; p < 4096; p++)
        for (int i = 0; i < 64; i++) r[p * 64 + i] = make_float2(std::cos(p * std::pow(1e6, -i / 64.0)), std::sin(p * std::pow(1e6, -i / 64.0)));
    rope.set(r);
    embed_rows<<<rows, 128>>>(embedding.p, tokens.p, x.p, hidden);
    norm_rows<<<(rows + 7) / 8, 256>>>(x.p, index.p, weight.p, out.p, rows, hidden);
    place_heads<<<dim3(rows, (heads + 23) / 8), 256>>>(qkv.p, positions.p, slots.p, norms.p, norms.p + HEAD, rope.p, q.p, cache.p, heads);
    CHECK(cudaDeviceSynchronize());
    auto he = embedding.host(), ho = out.host(), hq = q.host(), hc = cache.host();
    auto hx = x.host(), hw = weight.host(), hv = qkv.host(), hn = norms.host();
    size_t wrong = 0;
    std::vector<double> got, want;
    for (int i = 0; i < rows; i++) {
        double s = 0;
        for (int c = 0; c < hidden; c++) wrong += hx[size_t(i) * hidden + c] != panel(he, hidden, t[i], c), s += hx[size_t(ix[i]) * hidden + c] * hx[size_t(ix[i]) * hidden + c];
        for (int c = 0; c < hidden; c++) want.push_back(hx[size_t(ix[i]) * hidden + c] / std::sqrt(s / hidden + 1e-6) * hw[c]), got.push_back(panel(ho, hidden, i, c));
    }
    double norm = nmse(got, want);
    got.clear(), want.clear();
    for (int i = 0; i < rows; i++)
        for (int h = 0; h < heads + 16; h++) {
            const float* v = &hv[(size_t(i) * (heads + 16) + h) * HEAD];
            double y[HEAD], s = 0;
            for (int d = 0; d < HEAD; d++) s += double(v[d]) * v[d];
            for (int d = 0; d < HEAD; d++) y[d] = h < heads + 8 ? v[d] / std::sqrt(s / HEAD + 1e-6) * hn[(h < heads ? 0 : HEAD) + d] : v[d];
            for (int d = 0; d < HEAD; d++) {
                float2 c = r[pos[i] * 64 + d % 64];
                want.push_back(h >= heads + 8 ? y[d] : d < 64 ? y[d] * c.x - y[d + 64] * c.y : y[d] * c.x + y[d - 64] * c.y);
                int kv = h - heads, p = slot[i] % BLOCK;
                got.push_back(h < heads ? panel(hq, heads * HEAD, i, h * HEAD + d)
                                        : value(hc[((size_t(slot[i] / BLOCK) * 8 + kv % 8) * 2 + kv / 8) * BLOCK * HEAD + (p / 8 * 16 + d / 8) * 64 + p % 8 * 8 + d % 8]));
            }
        }
    double placed = nmse(got, want);
    bool ok = wrong == 0 && norm < 1e-5 && placed < 1e-5;
    std::printf("%d rows of %d, %d heads: embedding %zu wrong, norm (bf16) %.1e, heads (bf16) %.1e %s\n", rows, hidden, heads, wrong, norm, placed, ok ? "" : "WRONG");
    return ok;
}

int main() {
    if (!(check(37, 1024, 16) && check(70, 2560, 32) && check(9, 4096, 32))) return 1;
    constexpr int ROWS = 8192, HIDDEN = 2560, HEADS = 32;
    Buffer<float> x(size_t(ROWS) * HIDDEN), qkv(size_t(ROWS) * 6144), weight(HIDDEN);
    Buffer<bf16> out(size_t(ROWS) * HIDDEN), q(size_t(ROWS) * 4096), cache(size_t(256) * KV_HEADS * KV_TILE / 2);
    Buffer<float2> rope(64 * 8192);
    Buffer<uint32_t> ids(ROWS);
    std::vector<uint32_t> v(ROWS);
    for (int i = 0; i < ROWS; i++) v[i] = i;
    ids.set(v);
    fill_f32<<<1024, 256>>>(x.p, x.n, 1, 1, 0);
    fill_f32<<<1024, 256>>>(qkv.p, qkv.n, 2, 1, 0);
    double n = time_us(5, 10, [&] { norm_rows<<<ROWS / 8, 256>>>(x.p, nullptr, weight.p, out.p, ROWS, HIDDEN); });
    double h = time_us(5, 10, [&] { place_heads<<<dim3(ROWS, 6), 256>>>(qkv.p, ids.p, ids.p, weight.p, weight.p, rope.p, q.p, cache.p, HEADS); });
    std::printf("%d rows: norm %.1f us, %.2f TB/s; heads %.1f us, %.2f TB/s\n", ROWS, n, x.n * 6 / n / 1e6, h, qkv.n * 6 / h / 1e6);
}
