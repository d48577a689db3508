//! The page is compiled in by a macro that cargo does not see through.

fn main() {
    println!("cargo::rerun-if-changed=page");
}
