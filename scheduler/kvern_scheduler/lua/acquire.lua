-- Takes the lease with a new epoch, if nobody holds it.
-- KEYS  1 leader
-- ARGV  1 owner, 2 address, 3 lease in ms, 4 epoch to steal from (-1: none)
-- Gives {1, epoch, last step, next request number}
--    or {0, epoch, owner, address, ms until the lease ends}
redis.register_function('kvern_acquire' .. VERSION, function(keys, args)
  local leader = keys[1]
  local held = redis.call('HMGET', leader, 'epoch', 'owner', 'address', 'expiry_ms', 'step', 'next_rid')
  local epoch = tonumber(held[1] or 0)
  local left = tonumber(held[4] or 0) - now_ms()
  if left > 0 and held[2] ~= args[1] and tonumber(args[4]) ~= epoch then
    return {0, epoch, held[2], held[3], left}
  end
  redis.call('HSET', leader, 'epoch', epoch + 1, 'owner', args[1], 'address', args[2],
    'expiry_ms', now_ms() + tonumber(args[3]))
  return {1, epoch + 1, tonumber(held[5] or 0), tonumber(held[6] or 1)}
end)
