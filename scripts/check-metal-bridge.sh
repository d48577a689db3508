#!/usr/bin/env bash
# Type-checks crates/metal's bridge to Metal on a machine without Metal, and shows that the check sees a wrong call.
#
# objc2 and block2 know GNUstep's Objective-C runtime, so all that keeps objc2-metal from being checked on Linux is the
# attribute that links Apple's framework. A copy without it is made in target/; nothing is linked and nothing runs.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
work=$root/target/metal-bridge
mkdir -p "$work/src"

cargo fetch --locked --quiet
source=$(cargo metadata --locked --format-version 1 |
    python3 -c 'import json, sys, pathlib
for p in json.load(sys.stdin)["packages"]:
    if p["name"] == "objc2-metal": print(pathlib.Path(p["manifest_path"]).parent)')
rm -rf "$work/objc2-metal"
cp -r "$source" "$work/objc2-metal"
find "$work/objc2-metal" -name '*.rs' -exec sed -i '/^ *#\[link(name = .*kind = "framework")\]$/d' {} +

# The crate as it is on macOS: the bridge among its modules, with the same dependencies, and the program's file that calls it.
features=$(sed -n 's/^objc2-metal = .*features = \(\[.*\]\) }$/\1/p' crates/metal/Cargo.toml)
foundation=$(sed -n 's/^objc2-foundation = .*features = \[\(.*\)\] }$/\1/p' crates/metal/Cargo.toml)
cat > "$work/Cargo.toml" <<EOF
[package]
name = "metal-bridge"
version = "0.0.0"
edition = "2024"
[lib]
path = "src/lib.rs"
[dependencies]
engine = { path = "$root/crates/engine" }
model = { path = "$root/crates/model" }
objc2 = { version = "0.6", features = ["gnustep-2-1"] }
block2 = { version = "0.6", features = ["gnustep-2-1"] }
objc2-foundation = { version = "0.3", default-features = false, features = ["gnustep-2-1", $foundation] }
objc2-metal = { version = "0.3", default-features = false, features = $features }
[patch.crates-io]
objc2-metal = { path = "$work/objc2-metal" }
[workspace]
EOF
cp Cargo.lock "$work/Cargo.lock"

check() {
    {
        echo '#![allow(missing_docs, dead_code)]'
        for module in backend device forward kernels probe project rows step weights; do
            echo "#[path = \"$root/crates/metal/src/$module.rs\"] mod $module;"
        done
        echo "#[path = \"$1\"] mod bridge;"
        cat <<EOF
pub use {backend::{MetalBackend, MetalModel, Options}, bridge::{Gpu, devices}, device::Device, kernels::Class};
extern crate self as metal;
mod output { pub fn complain(_: &str) {} }
// As in crates/kipp/src/backends/mod.rs.
mod backends {
    #[path = "$root/crates/kipp/src/backends/metal.rs"] mod metal;
    use engine::{Backend, BackendError, KvConfig};
    #[derive(Clone, Copy)] pub enum MetalClass { Simdgroup, Tensor }
    #[derive(Clone, Copy)] pub struct Settings {
        pub device: usize, pub deterministic: bool, pub metal_class: Option<MetalClass>, pub threads: usize
    }
    pub struct Prepared { pub make: Box<Make>, pub room: Box<dyn Fn() -> Option<u64>> }
    type Make = dyn FnMut(KvConfig) -> Result<Box<dyn Backend>, BackendError>;
}
EOF
    } > "$work/src/lib.rs"
    cargo check --quiet --manifest-path "$work/Cargo.toml"
}

check "$root/crates/metal/src/bridge.rs"
# A planted fault: a buffer where an offset belongs.
sed 's/encoder.setBuffer_offset_atIndex(buffer, part.offset, index)/encoder.setBuffer_offset_atIndex(part.offset, buffer, index)/' \
    crates/metal/src/bridge.rs > "$work/src/wrong.rs"
cmp -s crates/metal/src/bridge.rs "$work/src/wrong.rs" && { echo "the planted fault was not planted"; exit 1; }
if check "$work/src/wrong.rs" 2> "$work/wrong.log"; then
    echo "the type check does not see a wrong call"
    exit 1
fi
grep -q "E0308" "$work/wrong.log" || { cat "$work/wrong.log"; exit 1; }
echo "the bridge's types are right, and a wrong call is seen"
