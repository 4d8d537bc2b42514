// Launches of a kernel as `tile build` writes them, over a device that keeps what it is told: the
// numbers below are those of `tile::launch` for the same kernel. Ends with 1 at the first that differs.

import Foundation
import Metal

final class Pipeline: MTLComputePipelineState {
    let maxTotalThreadsPerThreadgroup = 1024
}

final class Function: MTLFunction {
    let constants: [String]
    init(_ constants: [String]) { self.constants = constants }
}

final class Device: MTLDevice, MTLLibrary, @unchecked Sendable {
    var made: [String] = []
    var device: MTLDevice { self }

    func makeLibrary(URL: URL) throws -> MTLLibrary { self }

    func makeFunction(name: String, constantValues: MTLFunctionConstantValues) throws -> MTLFunction {
        Function([name] + constantValues.names)
    }

    func makeComputePipelineState(
        descriptor: MTLComputePipelineDescriptor, options: MTLPipelineOption,
        reflection: UnsafeMutablePointer<MTLComputePipelineReflection?>?
    ) throws -> MTLComputePipelineState {
        let function = descriptor.computeFunction as? Function
        let indirect = descriptor.supportIndirectCommandBuffers ? "indirect" : "direct"
        made.append((function?.constants ?? []).joined(separator: " ") + " " + indirect)
        return Pipeline()
    }
}

final class Memory: MTLBuffer, @unchecked Sendable {
    let length: Int
    private let bytes: UnsafeMutableRawPointer
    init(_ length: Int) {
        self.length = length
        bytes = .allocate(byteCount: length, alignment: 256)
    }
    func contents() -> UnsafeMutableRawPointer { bytes }
}

final class Encoder: MTLComputeCommandEncoder, MTLIndirectComputeCommand {
    var said: [String] = []
    func setComputePipelineState(_ state: MTLComputePipelineState) { said.append("pipeline") }
    func setBuffer(_ buffer: MTLBuffer?, offset: Int, index: Int) {
        said.append("\(index): buffer + \(offset)")
    }
    func setKernelBuffer(_ buffer: MTLBuffer, offset: Int, at index: Int) {
        said.append("\(index): buffer + \(offset)")
    }
    func setBytes(_ bytes: UnsafeRawPointer, length: Int, index: Int) {
        said.append("\(index): \(bytes.load(as: UInt32.self))")
    }
    func dispatchThreadgroups(_ grid: MTLSize, threadsPerThreadgroup threads: MTLSize) {
        said.append("\(grid.width) \(grid.height) \(grid.depth) x \(threads.width)")
    }
    func concurrentDispatchThreadgroups(_ grid: MTLSize, threadsPerThreadgroup threads: MTLSize) {
        dispatchThreadgroups(grid, threadsPerThreadgroup: threads)
    }
}

func expect<T: Equatable>(_ found: T, _ wanted: T, _ what: String) {
    guard found == wanted else {
        print("\(what): expected \(wanted), found \(found)")
        exit(1)
    }
}

let device = Device()
let json = try Data(contentsOf: URL(fileURLWithPath: CommandLine.arguments[1]))
let kernels = try Kernels(library: device, manifest: json)
let (x, y) = (Memory(96 * 2), Memory(1024))
let launch = Launch.scaled_rows_f16(
    x: Bound(x), y: Bound(y, offset: 256), by: 2.0, width: 16, rows: 5)

let encoder = Encoder()
try kernels.encode(launch, encoder)
let two = Float(2).bitPattern
expect(
    encoder.said, ["pipeline", "0: buffer + 0", "1: buffer + 256", "2: \(two)", "3 1 1 x 64"],
    "an encoded launch")
expect(
    device.made, ["scaled_rows_f16 scaled_rows_f16_width: uint indirect"], "the pipeline's function")

let (command, numbers) = (Encoder(), Memory(1024))
let prepared = try kernels.prepare(launch)
expect(prepared.numberBytes, 256, "bytes of numbers")
try prepared.record(command, numbers: numbers, at: 512)
expect(
    command.said,
    ["pipeline", "0: buffer + 0", "1: buffer + 256", "2: buffer + 512", "3 1 1 x 64"],
    "a recorded launch")
expect(numbers.contents().load(fromByteOffset: 512, as: UInt32.self), two, "a recorded number")

DispatchQueue.concurrentPerform(iterations: 64) { turn in
    var other = launch
    other.numbers["width"] = .uint(turn % 2 == 0 ? 8 : 16)
    _ = try? kernels.prepare(other)
}
expect(device.made.count, 2, "pipelines of two constants, made from many threads")

let chosen = try kernels.choose(
    family: "scaled_rows", types: ["x": "f16"], numbers: ["width": .uint(8)])
expect(chosen.name, "scaled_rows_f16", "the choice")

/// The name of the kernel of the family `picked` with these settings, or the error's line.
func picked(_ settings: [String: String]) -> String {
    do {
        return try kernels.choose(family: "picked", settings: settings).name
    } catch { return "\(error)" }
}
expect(picked(["f": "silu"]), "picked_silu_fast", "of two schedules the one for Apple's GPUs")
expect(picked(["f": "gelu"]), "picked_gelu", "the only one of its setting")
expect(picked(["f": "relu"]).contains("found none"), true, "a setting that no kernel has")
expect(
    picked([:]), "picked: expected one value of `f`, found gelu, silu", "kernels that differ in more")

/// The line that a change of the launch above is refused with.
func refused(_ change: (inout Launch) -> Void) -> String {
    var launch = launch
    change(&launch)
    do {
        _ = try kernels.prepare(launch)
    } catch { return "\(error)" }
    return "nothing"
}
for (wanted, change) in [
    ("expected width divisible by 8", { $0.numbers["width"] = .uint(12) }),
    ("expected x holds (rows + 1) * width", { $0.numbers["rows"] = .uint(6) }),
    ("expected y aligned to 16", { $0.buffers[1] = Bound(y, offset: 8) }),
    ("expected `y` aligned to 2", { $0.buffers[1] = Bound(y, offset: 1) }),
    ("expected `by` as f32, found u32", { $0.numbers["by"] = .uint(2) }),
    ("expected `rows` as u32, found none", { $0.numbers["rows"] = nil }),
    ("expected 2 buffers, found 1", { $0.buffers.removeLast() }),
    ("large: expected a kernel of this library for Metal", { $0.kernel = "large" }),
] as [(String, (inout Launch) -> Void)] {
    let found = refused(change)
    expect(found.contains(wanted) && !found.contains("\n"), true, "\(wanted), not: \(found)")
}
do {
    _ = try kernels.choose(family: "scaled_rows", numbers: ["width": .uint(12)])
    expect("a kernel", "none", "a choice for a width that no kernel takes")
} catch {}
do {
    try prepared.record(command, numbers: numbers, at: 1000)
    expect("recorded", "refused", "numbers beside their step")
} catch {}
print("as expected")
