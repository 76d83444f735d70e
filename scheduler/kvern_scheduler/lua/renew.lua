-- Prolongs the lease.
-- KEYS  1 leader
-- ARGV  1 epoch, 2 lease in ms
-- Gives 1, or -2 when the epoch is not the leader's (FENCED)
redis.register_function('kvern_renew' .. VERSION, function(keys, args)
  if redis.call('HGET', keys[1], 'epoch') ~= args[1] then return -2 end
  redis.call('HSET', keys[1], 'expiry_ms', now_ms() + tonumber(args[2]))
  return 1
end)
