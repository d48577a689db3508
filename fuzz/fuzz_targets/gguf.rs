//! Any bytes as a GGUF: read as a container, and as a model.

#![no_main]

use libfuzzer_sys::fuzz_target;
use model::Model;
use model::gguf::Gguf;
use model::tensor::Bytes;

fuzz_target!(|data: &[u8]| {
    let file = Bytes::new(data.to_vec());
    if let Ok(gguf) = Gguf::read(file.clone()) {
        for (_, value) in &gguf.metadata {
            let _ = value.to_string();
            if let Some(array) = value.as_array() {
                let _ = (array.strings().count(), array.i32s().count());
            }
        }
        let _ = gguf.check_values();
    }
    let _ = Model::read(file);
});
