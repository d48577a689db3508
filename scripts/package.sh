#!/bin/sh
# Packs a kipp binary with its man pages, completions and licences: DIR/kipp-VERSION-TARGET.tar.gz and its SHA-256.
#
#     sh scripts/package.sh target/release/kipp x86_64-unknown-linux-gnu dist
set -eu
kipp=$1 target=$2 into=$3
top=$(cd "$(dirname "$0")/.." && pwd)
name=kipp-$("$kipp" --version | cut -d' ' -f2)-$target

mkdir -p "$into"
into=$(cd "$into" && pwd)
rm -rf "${into:?}/$name"
mkdir -p "$into/$name/completions"
cp "$kipp" "$top/README.md" "$top/CHANGELOG.md" "$top/LICENSE-APACHE" "$top/LICENSE-MIT" "$top/NOTICE" "$into/$name"
cp -R "$top/deploy" "$into/$name"
"$kipp" manual --man "$into/$name/man"
"$kipp" completions bash >"$into/$name/completions/kipp.bash"
"$kipp" completions zsh >"$into/$name/completions/_kipp"
"$kipp" completions fish >"$into/$name/completions/kipp.fish"

cd "$into"
tar -czf "$name.tar.gz" "$name"
rm -r "$name"
# macOS has no sha256sum.
if command -v sha256sum >/dev/null; then sha256sum "$name.tar.gz"; else shasum -a 256 "$name.tar.gz"; fi >"$name.tar.gz.sha256"
cat "$name.tar.gz.sha256"
