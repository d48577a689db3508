fn main(){ cpu::peaks::micro(cpu::Class::available()[std::env::args().nth(1).map_or(0,|x|x.parse().unwrap())]); }
