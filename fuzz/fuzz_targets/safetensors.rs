//! Any bytes as a safetensors file.

#![no_main]

use hub::Safetensors;
use libfuzzer_sys::fuzz_target;
use model::tensor::Bytes;

fuzz_target!(|data: &[u8]| {
    if let Ok(file) = Safetensors::read(Bytes::new(data.to_vec())) {
        for tensor in &file.tensors {
            let _ = file.bytes(tensor).last();
        }
    }
});
