// What `Launch.swift` uses of Metal, with the signatures of Apple's headers, so that it can be
// compiled and run where there is no Metal. Nothing is launched: an encoder keeps what it is told.

import Foundation

public struct MTLSize: Equatable {
    public var width, height, depth: Int
    public init(width: Int, height: Int, depth: Int) {
        (self.width, self.height, self.depth) = (width, height, depth)
    }
}

public protocol MTLBuffer: AnyObject {
    var length: Int { get }
    func contents() -> UnsafeMutableRawPointer
}

public protocol MTLFunction: AnyObject {}

public enum MTLDataType { case uint, int, float, bool }

public final class MTLFunctionConstantValues {
    public private(set) var names: [String] = []
    public init() {}
    public func setConstantValue(_ value: UnsafeRawPointer, type: MTLDataType, withName name: String) {
        names.append("\(name): \(type)")
    }
}

public protocol MTLComputePipelineState: AnyObject {
    var maxTotalThreadsPerThreadgroup: Int { get }
}

public final class MTLComputePipelineDescriptor {
    public var computeFunction: MTLFunction?
    public var supportIndirectCommandBuffers = false
    public init() {}
}

public struct MTLPipelineOption: OptionSet, Sendable {
    public let rawValue: UInt
    public init(rawValue: UInt) { self.rawValue = rawValue }
}

public final class MTLComputePipelineReflection {}

public protocol MTLDevice: AnyObject {
    func makeLibrary(URL: URL) throws -> MTLLibrary
    func makeComputePipelineState(
        descriptor: MTLComputePipelineDescriptor, options: MTLPipelineOption,
        reflection: UnsafeMutablePointer<MTLComputePipelineReflection?>?
    ) throws -> MTLComputePipelineState
}

public protocol MTLLibrary: AnyObject {
    var device: MTLDevice { get }
    func makeFunction(name: String, constantValues: MTLFunctionConstantValues) throws -> MTLFunction
}

public protocol MTLComputeCommandEncoder: AnyObject {
    func setComputePipelineState(_ state: MTLComputePipelineState)
    func setBuffer(_ buffer: MTLBuffer?, offset: Int, index: Int)
    func setBytes(_ bytes: UnsafeRawPointer, length: Int, index: Int)
    func dispatchThreadgroups(_ threadgroupsPerGrid: MTLSize, threadsPerThreadgroup: MTLSize)
}

public protocol MTLIndirectComputeCommand: AnyObject {
    func setComputePipelineState(_ pipelineState: MTLComputePipelineState)
    func setKernelBuffer(_ buffer: MTLBuffer, offset: Int, at index: Int)
    func concurrentDispatchThreadgroups(_ threadgroupsPerGrid: MTLSize, threadsPerThreadgroup: MTLSize)
}
