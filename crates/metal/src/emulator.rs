//! A device that is the processor: compiles each kernel with clang against `emulator/metal_stdlib` and executes it with
//! `emulator/runtime.cpp`, which checks every access to memory. For tests.
//!
//! The text that is compiled is the text that Metal gets, but for attributes: C++ does not know them, and their meaning
//! is in the glue that is generated from them here.

use std::cell::UnsafeCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::{fs, slice};

use engine::BackendError;
use libloading::Library;

use crate::device::{Argument, Device, Launch};

type Result<T> = std::result::Result<T, BackendError>;

fn failed(what: impl std::fmt::Display) -> BackendError {
    BackendError::Device(what.to_string())
}

/// Changes to kernels' sources, for planted faults: (kernel, what stands there, what shall).
pub type Fault = (&'static str, &'static str, &'static str);

/// The processor as a device. Executes launches as they come.
pub struct Emulator {
    fault: Option<Fault>,
    largest_buffer: usize,
    /// Whether there are operations on tensors.
    pub has_tensors: bool,
    /// Whether memory can only be copied.
    pub refuses_to_share: bool,
    launches: AtomicU32,
    /// What was launched: kernel and function constants.
    pub launched: Mutex<BTreeSet<(&'static str, Vec<i32>)>>,
}

impl Emulator {
    /// A device whose buffers may be as large as a machine's.
    pub fn new() -> Self {
        Self::with(None, 1 << 40)
    }

    /// A device with a fault in a kernel, or small buffers.
    pub fn with(fault: Option<Fault>, largest_buffer: usize) -> Self {
        let launched = Mutex::default();
        let launches = AtomicU32::new(0);
        let (has_tensors, refuses_to_share) = (true, false);
        Emulator { fault, largest_buffer, has_tensors, refuses_to_share, launches, launched }
    }
}

/// Who touched a word of memory (`Cell` in runtime.cpp).
type Cell = [u32; 6];

/// Memory with a record of who touched it.
pub struct Memory {
    base: *mut u8,
    bytes: usize,
    /// Empty where nothing may be written.
    cells: Vec<UnsafeCell<Cell>>,
    /// Keeps what was allocated.
    _words: Vec<u128>,
}

// SAFETY: the memory is the buffer's own, or never written; a device executes one launch at a time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// A region of memory as runtime.cpp takes it.
#[repr(C)]
struct Region {
    base: *mut u8,
    bytes: u64,
    cells: *mut Cell,
}

type LaunchFunction =
    unsafe extern "C" fn(*const Region, i32, u32, *const u32, u32, u32, *mut c_char, u64) -> i32;

/// A compiled kernel.
pub struct Kernel {
    name: &'static str,
    /// Whether the parameter with each buffer index may be written.
    writable: Vec<bool>,
    /// Names of the function constants by index.
    constants: BTreeMap<usize, String>,
    library: Library,
}

/// A kernel and its function constants.
pub struct Specialised {
    kernel: *const Kernel,
    constants: Vec<i32>,
}

// SAFETY: the kernel lives as long as its model, which outlives its backends.
unsafe impl Send for Specialised {}
// SAFETY: as above.
unsafe impl Sync for Specialised {}

impl Device for Emulator {
    type Buffer = Memory;
    type Library = Box<Kernel>;
    type Pipeline = Specialised;
    type Queue = ();
    type Ticket = ();

    fn describe(&self) -> String {
        "emulator".into()
    }

    fn largest_buffer(&self) -> usize {
        self.largest_buffer
    }

    fn page(&self) -> usize {
        4096
    }

    fn allocate(&self, bytes: usize, _purpose: &'static str) -> Result<Memory> {
        let mut words = vec![0u128; bytes.div_ceil(16)];
        let base = words.as_mut_ptr().cast();
        let cells = (0..bytes.div_ceil(4)).map(|_| UnsafeCell::default()).collect();
        Ok(Memory { base, bytes, cells, _words: words })
    }

    unsafe fn share(&self, start: *const u8, bytes: usize) -> Option<Memory> {
        let base = start.cast_mut();
        let memory = Memory { base, bytes, cells: Vec::new(), _words: Vec::new() };
        (!self.refuses_to_share).then_some(memory)
    }

    fn library(&self, kernel: &'static str, source: &str, tensors: bool) -> Result<Box<Kernel>> {
        if tensors && !self.has_tensors {
            return Err(BackendError::Unavailable("no operations on tensors".into()));
        }
        let source = match self.fault {
            Some((name, from, to)) if name == kernel => {
                assert_eq!(source.matches(from).count(), 1, "{from} in {kernel}");
                source.replace(from, to)
            }
            _ => source.to_string(),
        };
        Kernel::compile(kernel, &source, if tensors { "-std=c++20" } else { "-std=c++17" })
            .map(Box::new)
    }

    fn pipeline(&self, library: &Box<Kernel>, constants: &[i32]) -> Result<Specialised> {
        Ok(Specialised { kernel: &raw const **library, constants: constants.to_vec() })
    }

    fn queue(&self) -> Result<()> {
        Ok(())
    }

    fn launch(&self, _queue: &mut (), launch: Launch<'_, Self>) -> Result<()> {
        let number = self.launches.fetch_add(1, Ordering::Relaxed) + 1;
        // SAFETY: libraries live as long as their model.
        let kernel = unsafe { &*launch.pipeline.kernel };
        let constants = &launch.pipeline.constants;
        self.launched.lock().unwrap().insert((kernel.name, constants.clone()));
        kernel
            .run(constants, &launch, number)
            .map_err(|why| failed(format!("{}: {why}", kernel.name)))
    }

    fn commit(&self, _queue: &mut ()) -> Result<()> {
        Ok(())
    }

    fn wait(&self, _ticket: ()) -> Result<()> {
        Ok(())
    }

    fn bytes(&self, buffer: &Memory) -> usize {
        buffer.bytes
    }

    fn write(&self, buffer: &Memory, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= buffer.bytes);
        // SAFETY: inside the buffer, and no launch is under way.
        unsafe { buffer.base.add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn read(&self, buffer: &Memory, at: usize, out: &mut [u8]) {
        assert!(at + out.len() <= buffer.bytes);
        // SAFETY: inside the buffer, and no launch is under way.
        out.copy_from_slice(unsafe { slice::from_raw_parts(buffer.base.add(at), out.len()) });
    }
}

impl Kernel {
    fn run(
        &self,
        constants: &[i32],
        launch: &Launch<'_, Emulator>,
        number: u32,
    ) -> std::result::Result<(), String> {
        for (index, name) in &self.constants {
            // SAFETY: the glue exports a pointer to each constant, an int, under its name.
            unsafe {
                let place = self.library.get::<*mut *mut i32>(format!("kipp_{name}").as_bytes());
                ***place.map_err(|error| error.to_string())? = constants[*index];
            }
        }
        if launch.arguments.len() != self.writable.len() {
            return Err(format!("{} arguments of {}", launch.arguments.len(), self.writable.len()));
        }
        let mut regions = Vec::new();
        for (argument, &writable) in launch.arguments.iter().zip(&self.writable) {
            regions.push(match argument {
                Argument::Memory(part) => {
                    assert!(part.offset + part.bytes <= part.buffer.bytes, "{}", self.name);
                    let mut cells = std::ptr::null_mut();
                    if writable {
                        assert!(part.offset % 4 == 0, "{} writes words", self.name);
                        cells = part.buffer.cells[part.offset / 4].get();
                    }
                    // SAFETY: inside the buffer.
                    let base = unsafe { part.buffer.base.add(part.offset) };
                    Region { base, bytes: part.bytes as u64, cells }
                }
                Argument::Words(words) => Region {
                    base: words.as_ptr().cast_mut().cast(),
                    bytes: size_of_val(*words) as u64,
                    cells: std::ptr::null_mut(),
                },
            });
        }
        let grid = launch.grid.map(|n| n as u32);
        let mut error = [0u8; 512];
        // SAFETY: the function is the runtime's, with this signature; the regions are live and its own to check.
        let outcome = unsafe {
            let run = self.library.get::<LaunchFunction>(b"kipp_launch");
            (run.map_err(|error| error.to_string())?)(
                regions.as_ptr(),
                regions.len() as i32,
                launch.shared as u32,
                grid.as_ptr(),
                launch.threads as u32,
                number,
                error.as_mut_ptr().cast(),
                error.len() as u64,
            )
        };
        match (outcome, CStr::from_bytes_until_nul(&error)) {
            (0, _) => Ok(()),
            (_, Ok(text)) => Err(text.to_string_lossy().into_owned()),
            (_, Err(error)) => Err(error.to_string()),
        }
    }

    /// Compiles a kernel twice: once with address spaces, to be checked only, and once to be executed.
    fn compile(name: &'static str, source: &str, language: &str) -> Result<Self> {
        let parsed = Parsed::read(name, source).map_err(|why| failed(format!("{name}: {why}")))?;
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/metal-emulator");
        fs::create_dir_all(&folder).map_err(failed)?;
        let runtime = include_str!("../emulator/runtime.cpp");
        let headers = [
            include_str!("../emulator/metal_stdlib"),
            include_str!("../emulator/metal_tensor"),
            include_str!("../emulator/MetalPerformancePrimitives/MetalPerformancePrimitives.h"),
        ];
        let program = format!("{}\n{}", parsed.text, parsed.glue);
        let mut hasher = DefaultHasher::new();
        (runtime, headers, &program, language, COMMON, CHECK, EXECUTE, RUNTIME).hash(&mut hasher);
        let compiled = folder.join(format!("{name}-{:016x}.so", hasher.finish()));
        // Tests run beside each other: a name of one's own until it is complete.
        static UNIQUE: AtomicUsize = AtomicUsize::new(0);
        let own =
            format!("{name}-{}-{}", std::process::id(), UNIQUE.fetch_add(1, Ordering::Relaxed));
        let file = |ending: &str| folder.join(format!("{own}.{ending}"));
        if !compiled.exists() {
            let (code, object, library) = (file("cpp"), file("o"), file("so"));
            fs::write(&code, program).map_err(failed)?;
            let runtime = Path::new(env!("CARGO_MANIFEST_DIR")).join("emulator/runtime.cpp");
            let language = &[language];
            clang(&[language, COMMON, CHECK].concat(), &[&code], None)?;
            clang(&[language, COMMON, EXECUTE].concat(), &[&code], Some(&object))?;
            clang(&[language, COMMON, RUNTIME].concat(), &[&runtime, &object], Some(&library))?;
            fs::rename(&library, &compiled).map_err(failed)?;
            for done in [code, object] {
                fs::remove_file(done).map_err(failed)?;
            }
        }
        // The loader gives a file out once, and constants are the file's: every device gets a copy.
        let copy = file("copy.so");
        fs::copy(&compiled, &copy).map_err(failed)?;
        // SAFETY: loading runs only an empty initialiser.
        let library = unsafe { Library::new(&copy) }.map_err(failed)?;
        fs::remove_file(&copy).map_err(failed)?;
        Ok(Kernel { name, writable: parsed.writable, constants: parsed.constants, library })
    }
}

/// Flags of all compilations. The language is another for tensors, whose descriptors are arguments of templates.
const COMMON: &[&str] = &[
    "-fsigned-char",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    "-Wno-unused-const-variable",
    "-Werror",
];
/// Of the one that checks address spaces.
const CHECK: &[&str] = &["-DKIPP_ADDRESS_SPACES", "-fsyntax-only"];
/// Of the one that is executed: calls to the runtime before every access, of which none is of a size that has no call.
const EXECUTE: &[&str] = &[
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-fsanitize=thread",
    "-fno-vectorize",
    "-fno-slp-vectorize",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
    "-c",
];
/// Of the runtime.
const RUNTIME: &[&str] = &["-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-shared"];

fn clang(flags: &[&str], inputs: &[&PathBuf], output: Option<&PathBuf>) -> Result<()> {
    let mut command = Command::new("clang++");
    command.args(flags).arg("-I").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("emulator"));
    command.args(inputs);
    if let Some(output) = output {
        command.arg("-o").arg(output);
    }
    let run = command.output().map_err(|error| failed(format!("clang++: {error}")))?;
    if run.status.success() {
        return Ok(());
    }
    Err(failed(format!("{command:?}:\n{}", String::from_utf8_lossy(&run.stderr))))
}

/// A kernel's source as C++, and what its attributes say.
struct Parsed {
    /// Without attributes.
    text: String,
    /// Calls the kernel, and exports its constants.
    glue: String,
    writable: Vec<bool>,
    constants: BTreeMap<usize, String>,
}

impl Parsed {
    fn read(name: &str, source: &str) -> std::result::Result<Self, String> {
        let mut constants = BTreeMap::new();
        for line in source.lines().filter(|line| line.contains("[[function_constant(")) {
            let (declared, rest) = line.split_once("[[function_constant(").unwrap_or_default();
            let index = rest.split(')').next().and_then(|n| n.parse().ok());
            let name = declared.split_whitespace().last().unwrap_or_default();
            constants.insert(index.ok_or(line)?, name.to_string());
        }
        let (_, rest) = source.split_once("\nkernel void ").ok_or("no kernel")?;
        if rest.contains("\nkernel void ") || !rest.starts_with(&format!("{name}(")) {
            return Err("expected one kernel with the file's name".into());
        }
        let parameters = rest.split_once('(').and_then(|(_, rest)| rest.split_once(") {"));
        let (mut call, mut writable) = (Vec::new(), Vec::new());
        for parameter in parameters.ok_or("no parameters")?.0.split("]],") {
            let (declared, attribute) = parameter.split_once("[[").ok_or("no attribute")?;
            let attribute = attribute.trim_end_matches("]]").trim();
            let (kind, name) = declared.trim().rsplit_once([' ', '\n']).ok_or("no name")?;
            let (mut kind, name) = (kind.trim().to_string(), name.trim());
            // The star or ampersand may stand at the name.
            kind.extend(name.chars().take_while(|c| "*&".contains(*c)));
            call.push(match attribute {
                "threadgroup(0)" => format!("({kind})shared"),
                "threadgroup_position_in_grid" => "emulator::here().group".into(),
                "thread_index_in_threadgroup" => "emulator::here().thread_index".into(),
                "thread_index_in_simdgroup" => "emulator::here().lane".into(),
                "simdgroup_index_in_threadgroup" => "emulator::here().simdgroup".into(),
                buffer if buffer == format!("buffer({})", writable.len()) => {
                    let index = writable.len();
                    writable.push(kind.starts_with("device ") && !kind.contains("const "));
                    match kind.strip_suffix('&') {
                        Some(by_value) => format!("*({by_value}*)regions[{index}].base"),
                        None => format!("({kind})regions[{index}].base"),
                    }
                }
                other => return Err(format!("attribute {other}")),
            });
        }
        let exports: String = constants
            .values()
            .map(|name| format!("extern \"C\" __attribute__((visibility(\"default\"))) int* kipp_{name} = &{name};\n"))
            .collect();
        let glue = format!(
            "#ifndef KIPP_ADDRESS_SPACES\nstruct Region {{ char* base; ulong bytes; void* cells; }};\n\
             void enter(const Region* regions, char* shared) {{\n    {name}({});\n}}\n{exports}#endif\n",
            call.join(",\n        ")
        );
        Ok(Parsed { text: without_attributes(source), glue, writable, constants })
    }
}

/// Replaces `[[...]]` by nothing.
fn without_attributes(source: &str) -> String {
    let mut out = String::new();
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("[[") {
        out.push_str(before);
        rest = after.split_once("]]").map_or("", |(_, after)| after);
    }
    out + rest
}
